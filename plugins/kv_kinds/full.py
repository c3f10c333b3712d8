"""Cache rules of layers that read every past token: all blocks stay live until the end.

Declaration and rules in one file: the rules are plain integer arithmetic, nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cardcage.core.contracts import KVKindCaps, KVKindNeed, PluginContext
from cardcage.core.errors import ConfigError
from cardcage.core.types import KVGroupSpec


class FullKind:
    """Every token is read by every later one. `block_size` in tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def num_blocks(self, num_tokens: int) -> int:
        """ceil(num_tokens / S)."""
        return -(-num_tokens // self.block_size)

    def first_live_block(self, num_confirmed: int) -> int:
        """Always 0: nothing is ever left behind."""
        return 0

    def max_live_blocks(self, num_tokens: int, in_flight: int) -> int:
        """All blocks, whatever is in flight."""
        return self.num_blocks(num_tokens)

    def find_hit(self, is_cached: Callable[[int], bool], limit_blocks: int) -> int:
        """The leading run of cached blocks."""
        for index in range(limit_blocks):
            if not is_cached(index):
                return index
        return limit_blocks

    def cacheable(self) -> bool:
        return True


class Full:
    """Full attention: a block for every block of tokens, none freed early."""

    name = "full"
    api = "kv_kinds>=1.0,<2"
    caps = KVKindCaps(priority=50)
    options = None

    def build(self, need: KVKindNeed, ctx: PluginContext, options: Any) -> FullKind:
        """`ctx.extras["group"]` is the group's spec. Raises ConfigError for foreign options."""
        group: KVGroupSpec = ctx.extras["group"]
        if group.options:
            raise ConfigError(
                f"KV group {group.name}: kind 'full' takes no options, got "
                f"{sorted(group.options)}; use another kind or drop them"
            )
        return FullKind(group.block_size)
