"""Block lists over groups: the hit fixed point against brute force, reservations, caching."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardcage.core.errors import ConfigError, ResourceError
from cardcage.core.kv_manager import KVManager
from cardcage.core.request_state import RequestState
from cardcage.core.scheduler_config import SchedulerConfig
from cardcage.core.types import KVCapacity, KVGroupSpec, Request, SamplingParams
from tests.support.core_rig import FULL, kind_of


def manager(groups: Sequence[KVGroupSpec], pool_bytes: int = 1 << 16, **numbers: object
            ) -> KVManager:  # fmt: skip
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=16, **numbers)
    capacity = KVCapacity(tuple(groups), pool_bytes, 4, 64)
    return KVManager(config, capacity, [kind_of(g) for g in groups], 64)


def state_of(tokens: Sequence[int], groups: int, root_key: bytes = b"") -> RequestState:
    request = Request(request_id="r", prompt_token_ids=tokens, params=SamplingParams(),
                      root_key=root_key)  # fmt: skip
    return RequestState(request=request, key=(0, 0), max_len=64, stops=frozenset(),
                        num_groups=groups)  # fmt: skip


GROUPS = st.lists(
    st.tuples(st.sampled_from(["full", "window"]), st.sampled_from([2, 4, 6]), st.integers(1, 12)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 40), st.data())
def test_hit_is_the_longest_that_all_groups_have(
    kinds: list[tuple[str, int, int]], length: int, data: st.DataObject
) -> None:
    groups = [
        KVGroupSpec(f"g{i}", kind, size, 64, {"window": window} if kind == "window" else {})
        for i, (kind, size, window) in enumerate(kinds)
    ]
    kv = manager(groups)
    tokens = list(range(length))
    first = state_of(tokens, len(groups))
    assert kv.reserve([(first, length, 0)]) is not None
    kv.cache_full(first, length)
    kv.give_back(first)
    cached = []
    for group, spec in enumerate(groups):  # then some blocks are evicted
        full = range(length // spec.block_size)
        kept = data.draw(st.sets(st.sampled_from(full)) if full else st.just(set()))
        cached.append(kept)
        cls = kv.pool._class_of[group]
        for index in set(full) - kept:
            block = kv.pool.lookup(group, kv._key(first, group, index))
            if block is not None:
                del cls.lru[block]
                kv.pool._forget(cls, block)
                cls.blank[block] = None
    want = 0
    for hit in range(0, length, kv.align):
        good = True
        for spec, kind, kept in zip(groups, kv.kinds, cached):
            needed = range(kind.first_live_block(hit), hit // spec.block_size)
            good &= set(needed) <= kept
        want = hit if good else want
    second = state_of(tokens, len(groups))
    assert kv.take_hit(second) == want
    for group, spec in enumerate(groups):
        assert len(second.block_ids[group]) == want // spec.block_size
    kv.give_back(second)
    kv.pool.check()


def test_a_hit_leaves_one_token_to_compute() -> None:
    kv = manager([FULL])
    first = state_of(range(8), 1)
    kv.take_hit(first)
    kv.reserve([(first, 8, 0)])
    kv.cache_full(first, 8)
    assert kv.take_hit(state_of(range(8), 1)) == 4
    assert kv.take_hit(state_of(range(9), 1)) == 8


def test_tenants_and_scoring_requests_do_not_share() -> None:
    kv = manager([FULL])
    first = state_of(range(9), 1, b"one")
    kv.take_hit(first)
    kv.reserve([(first, 9, 0)])
    kv.cache_full(first, 9)
    assert kv.take_hit(state_of(range(9), 1, b"two")) == 0
    scoring = state_of(range(9), 1, b"one")
    scoring.prompt_logprobs = [None] * 9
    assert kv.take_hit(scoring) == 0


def test_only_confirmed_kept_tokens_are_cached() -> None:
    kv = manager([FULL])
    state = state_of(range(6), 1)
    kv.take_hit(state)
    kv.reserve([(state, 12, 0)])
    kv.cache_full(state, 12)  # 6 tokens are known: drafts beyond them do not count
    assert kv.pool.num_cached == 1


def test_windows_release_by_the_confirmed_position() -> None:
    window = KVGroupSpec("w", "window", 4, 64, {"window": 5})
    kv = manager([window])
    state = state_of(range(40), 1)
    kv.reserve([(state, 16, 0)])
    held = list(state.block_ids[0])
    kv.reserve([(state, 20, 11)])  # next query reads from 7 on
    assert state.block_ids[0][:2] == [0, held[1]]
    kv.reserve([(state, 20, 12)])
    assert state.block_ids[0][:3] == [0, 0, held[2]]
    kv.pool.check()


def test_reservation_is_all_or_nothing() -> None:
    small = KVGroupSpec("s", "full", 4, 32)
    large = KVGroupSpec("l", "full", 4, 96)
    kv = manager([small, large], 96 * 7)
    state = state_of(range(64), 2)
    assert kv.reserve([(state, 60, 0)]) is None
    assert state.block_ids == [[], []]
    assert kv.pool.usage == 0.0


def test_longest_fit_counts_live_window_blocks_only() -> None:
    window = KVGroupSpec("w", "window", 4, 64, {"window": 3})
    assert manager([FULL], 64 * 9).max_fit_len == 33  # the last token is never computed
    # in flight 2 * 16 tokens and 2 past ones: at most 10 blocks at any length
    assert manager([window], 64 * 11).max_fit_len == 64
    two = [KVGroupSpec(n, "full", 4, 64) for n in "ab"]
    with pytest.raises(ResourceError, match="one token of every group"):
        manager(two, 64 * 2)


def test_no_groups_need_no_memory() -> None:
    kv = manager([], 0)
    state = state_of(range(5), 0)
    assert kv.take_hit(state) == 0
    assert kv.reserve([(state, 64, 0)]) == []
    assert kv.covered(state, 5) == 64
    kv.give_back(state)


def test_kinds_must_match_groups() -> None:
    capacity = KVCapacity((FULL,), 1 << 12, 1, 8)
    with pytest.raises(ConfigError, match="1 KV groups but 0 kinds"):
        KVManager(SchedulerConfig(), capacity, [], 8)
