"""The rules of full attention groups."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cardcage.core.contracts import KVKindNeed, PluginContext
from cardcage.core.errors import ConfigError
from cardcage.core.types import KVGroupSpec
from cardcage.plugins.kv_kinds.full import Full, FullKind


def context(group: KVGroupSpec) -> PluginContext:
    return PluginContext(logging.getLogger("test"), {}, lambda: 0.0, Path("."),
                         extras={"group": group})  # fmt: skip


def test_counts_blocks() -> None:
    kind = FullKind(16)
    assert [kind.num_blocks(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert kind.max_live_blocks(33, in_flight=8) == 3
    assert kind.first_live_block(10_000) == 0
    assert kind.cacheable()


@pytest.mark.parametrize(("cached", "limit", "hit"), [
    ({0, 1, 2}, 3, 3), ({0, 1, 2}, 2, 2), ({0, 2}, 3, 1), ({1, 2}, 3, 0), (set(), 3, 0),
])  # fmt: skip
def test_hit_is_the_leading_run(cached: set[int], limit: int, hit: int) -> None:
    assert FullKind(4).find_hit(cached.__contains__, limit) == hit


def test_declaration_builds_and_refuses_options() -> None:
    built = Full().build(KVKindNeed(), context(KVGroupSpec("g", "full", 8, 64)), None)
    assert built.block_size == 8
    with pytest.raises(ConfigError, match="takes no options"):
        Full().build(KVKindNeed(), context(KVGroupSpec("g", "full", 8, 64, {"window": 3})), None)
