"""Cache rules of sliding-window layers: a token reads itself and the `window - 1` before it.

With `c` confirmed tokens the next query stands at position c or later and reads keys from
c - W + 1 on, so blocks that lie wholly below are free. Declaration and rules in one file: plain
integer arithmetic, nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cardcage.core.contracts import KVKindCaps, KVKindNeed, PluginContext
from cardcage.core.errors import ConfigError
from cardcage.core.types import KVGroupSpec


class WindowKind:
    """`window` counts visible keys, the query's own included. `block_size` in tokens."""

    def __init__(self, block_size: int, window: int) -> None:
        self.block_size = block_size
        self.window = window

    def num_blocks(self, num_tokens: int) -> int:
        """ceil(num_tokens / S): blocks keep their logical index when earlier ones are freed."""
        return -(-num_tokens // self.block_size)

    def first_live_block(self, num_confirmed: int) -> int:
        """The block of position num_confirmed - W + 1."""
        return max(0, num_confirmed - self.window + 1) // self.block_size

    def max_live_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks touched by W - 1 past tokens and `in_flight` new ones, wherever they begin."""
        span = self.window - 1 + max(in_flight, 1)
        touched = (span + self.block_size - 2) // self.block_size + 1
        return min(self.num_blocks(num_tokens), touched)

    def find_hit(self, is_cached: Callable[[int], bool], limit_blocks: int) -> int:
        """Largest h with every block in [first_live_block(h * S), h) cached, right to left."""
        hit = limit_blocks
        index = limit_blocks
        while hit:
            first = self.first_live_block(hit * self.block_size)
            while index > first and is_cached(index - 1):
                index -= 1
            if index <= first:
                return hit
            hit = index - 1  # block index - 1 is missing: no hit may need it
            index = hit
        return 0

    def cacheable(self) -> bool:
        return True


class Window:
    """Sliding-window attention: blocks left of the window return to the pool early."""

    name = "window"
    api = "kv_kinds>=1.0,<2"
    caps = KVKindCaps(priority=50)
    options = None

    def build(self, need: KVKindNeed, ctx: PluginContext, options: Any) -> WindowKind:
        """`ctx.extras["group"]` is the group's spec with options {"window": W >= 1}.

        Raises ConfigError when the window is missing, below 1, or another option is given.
        """
        group: KVGroupSpec = ctx.extras["group"]
        window = group.options.get("window", 0)
        if window < 1 or set(group.options) != {"window"}:
            raise ConfigError(
                f"KV group {group.name}: kind 'window' needs exactly the option window >= 1, "
                f"got {dict(group.options)}"
            )
        return WindowKind(group.block_size, window)
