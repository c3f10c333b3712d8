"""The rules of sliding-window groups, against brute force."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardcage.core.contracts import KVKindNeed, PluginContext
from cardcage.core.errors import ConfigError
from cardcage.core.types import KVGroupSpec
from cardcage.plugins.kv_kinds.window import Window, WindowKind

SIZES, WINDOWS = st.integers(1, 6), st.integers(1, 20)


def blocks_read(size: int, window: int, position: int) -> set[int]:
    """Blocks that a query at `position` reads besides its own key."""
    return {p // size for p in range(max(0, position - window + 1), position)}


@given(SIZES, WINDOWS, st.integers(0, 60))
def test_first_live_block_keeps_all_that_is_read(size: int, window: int, confirmed: int) -> None:
    first = WindowKind(size, window).first_live_block(confirmed)
    for position in range(confirmed, confirmed + 30):
        past = {b for b in blocks_read(size, window, position) if b * size < confirmed}
        assert not past or first <= min(past)
    if first:  # and not one block more than needed
        assert first * size <= confirmed - window + 1


@given(SIZES, WINDOWS, st.integers(1, 60), st.integers(1, 20))
def test_max_live_blocks_bounds_every_moment(
    size: int, window: int, num_tokens: int, in_flight: int
) -> None:
    kind = WindowKind(size, window)
    for confirmed in range(num_tokens):
        held = kind.num_blocks(min(confirmed + in_flight, num_tokens))
        held -= kind.first_live_block(confirmed)
        assert held <= kind.max_live_blocks(num_tokens, in_flight)


@given(SIZES, WINDOWS, st.sets(st.integers(0, 12)), st.integers(0, 12))
def test_hit_is_the_longest_usable_one(
    size: int, window: int, cached: set[int], limit: int
) -> None:
    kind = WindowKind(size, window)
    usable = [h for h in range(limit + 1) if blocks_read(size, window, h * size) <= cached]
    assert kind.find_hit(cached.__contains__, limit) == max(usable)


def test_declaration_needs_a_window() -> None:
    def build(**options: int) -> WindowKind:
        group = KVGroupSpec("g", "window", 8, 64, options)
        ctx = PluginContext(logging.getLogger("test"), {}, lambda: 0.0, Path("."),
                            extras={"group": group})  # fmt: skip
        return Window().build(KVKindNeed(), ctx, None)

    assert build(window=5).window == 5
    assert build(window=5).cacheable()
    for options in ({}, {"window": 0}, {"window": 4, "sink": 1}):
        with pytest.raises(ConfigError, match="window >= 1"):
            build(**options)
