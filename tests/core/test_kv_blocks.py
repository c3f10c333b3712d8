"""The block pool: order of reuse, ref counts, size classes, and a fuzz against an oracle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardcage.core.errors import ResourceError
from cardcage.core.kv_blocks import BlockPool, plan_frames
from cardcage.core.types import KVGroupSpec


def pool_of(blocks: int) -> BlockPool:
    return BlockPool([KVGroupSpec("g", "full", 4, 64)], (blocks + 1) * 64)


def take(pool: BlockPool, *needs: int) -> list[list[int]]:
    got = pool.allocate(needs)
    assert got is not None
    return got


# ---- frames -------------------------------------------------------------------------------------


def test_one_page_size_wastes_nothing_but_the_null_block() -> None:
    pool = pool_of(10)
    assert pool.num_blocks(0) == 10
    assert pool.usable_bytes(0) == 640
    assert sorted(take(pool, 10)[0]) == list(range(1, 11))
    assert pool.allocate([1]) is None
    assert pool.usage == 1.0


def test_common_multiple_loses_nothing_inside_frames() -> None:
    layout = plan_frames(1_000_000, [4096, 5 * 4096])
    assert layout.frame_bytes == 5 * 4096
    assert layout.pages == (5, 1)
    assert layout.base == 5 * 4096


def test_awkward_sizes_lose_little() -> None:
    sizes = [65_536 + 64, 65_536 * 3 + 128]
    layout = plan_frames(1 << 30, sizes)
    for pages, size in zip(layout.pages, sizes):
        assert layout.num_frames * pages * size > 0.95 * (1 << 30)


def test_too_small_a_pool_is_refused() -> None:
    with pytest.raises(ResourceError, match="cannot hold one block of each size"):
        plan_frames(100, [64])
    with pytest.raises(ResourceError, match="more memory"):
        plan_frames(400, [64, 96])


def test_no_groups_is_an_empty_pool() -> None:
    pool = BlockPool([], 0)
    assert pool.allocate([]) == []
    assert pool.usage == 0.0
    assert pool.reset()


# ---- order of reuse -----------------------------------------------------------------------------


def test_blank_blocks_first_then_the_oldest_cached() -> None:
    pool = pool_of(4)
    a, b, c, d = take(pool, 4)[0]
    for block, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        assert pool.cache(0, block, key)
    pool.free(0, [b])
    pool.free(0, [c, a])
    pool.free(0, [d])
    assert take(pool, 1)[0] == [d]  # nothing worth keeping
    assert take(pool, 1)[0] == [b]  # released first
    assert pool.lookup(0, b"b") is None
    assert pool.lookup(0, b"a") == a


def test_end_of_a_prompt_is_evicted_before_its_start() -> None:
    pool = pool_of(3)
    ids = take(pool, 3)[0]
    for block in ids:
        pool.cache(0, block, bytes([block]))
    pool.free(0, ids[::-1])
    assert take(pool, 2)[0] == [ids[2], ids[1]]
    assert pool.lookup(0, bytes([ids[0]])) == ids[0]


def test_touch_protects_and_counts() -> None:
    pool = pool_of(2)
    (a,) = take(pool, 1)[0]
    pool.cache(0, a, b"k")
    pool.free(0, [a])
    pool.touch(0, [a])
    pool.touch(0, [a, 0])
    assert pool.ref_count(0, a) == 2
    assert not pool.can_allocate([2])
    pool.free(0, [a])
    pool.free(0, [a])
    assert pool.can_allocate([2])
    with pytest.raises(AssertionError, match="double free"):
        pool.free(0, [a])


def test_first_of_two_equal_blocks_keeps_the_key() -> None:
    pool = pool_of(2)
    a, b = take(pool, 2)[0]
    assert pool.cache(0, a, b"k")
    assert not pool.cache(0, b, b"k")
    assert not pool.cache(0, a, b"other")
    pool.free(0, [a, b])
    assert pool.lookup(0, b"k") == a
    assert take(pool, 1)[0] == [b]


def test_generation_tells_a_stale_holder() -> None:
    pool = pool_of(1)
    (a,) = take(pool, 1)[0]
    before = pool.generation(0, a)
    pool.free(0, [a])
    assert pool.generation(0, a) == before
    take(pool, 1)
    assert pool.generation(0, a) != before


def test_reset_needs_an_idle_pool() -> None:
    pool = pool_of(2)
    ids = take(pool, 1)[0]
    pool.cache(0, ids[0], b"k")
    assert not pool.reset()
    pool.free(0, ids)
    assert pool.num_cached == 1
    assert pool.reset()
    assert pool.num_cached == 0
    assert pool.lookup(0, b"k") is None
    assert len(take(pool, 2)[0]) == 2


def test_keep_bytes_leaves_room() -> None:
    pool = pool_of(4)
    assert pool.can_allocate([3], keep_bytes=64)
    assert not pool.can_allocate([4], keep_bytes=64)


# ---- size classes -------------------------------------------------------------------------------

SMALL = KVGroupSpec("small", "full", 4, 32)
LARGE = KVGroupSpec("large", "full", 4, 96)


def test_a_class_takes_over_idle_frames_of_another() -> None:
    pool = BlockPool([SMALL, LARGE], 96 * 9)
    small = take(pool, pool.num_blocks(0), 0)[0]
    for block in small:
        pool.cache(0, block, bytes([block]))
    assert pool.allocate([0, 1]) is None
    kept, rest = small[:2], small[2:]
    generations = [pool.generation(0, block) for block in rest]
    pool.free(0, rest[::-1])
    large = take(pool, 0, pool.layout.num_frames - 1)[1]
    assert len(large) == pool.layout.num_frames - 1
    assert all(pool.lookup(0, bytes([block])) == block for block in kept)
    pool.check()
    taken = [b for b in rest if pool.lookup(0, bytes([b])) is None]
    assert taken
    assert all(pool.generation(0, b) != g for b, g in zip(rest, generations) if b in taken)


def test_oldest_cached_block_goes_first_over_all_classes() -> None:
    pool = BlockPool([SMALL, LARGE], 96 * 3)  # two frames
    (large,) = take(pool, 0, 1)[1]
    pool.cache(1, large, b"large")
    pool.free(1, [large])  # idle since before anything small is released
    small = take(pool, 3, 0)[0]
    for block in small:
        pool.cache(0, block, bytes([block]))
    pool.free(0, small[::-1])
    take(pool, 1, 0)
    assert pool.lookup(1, b"large") is None
    assert all(pool.lookup(0, bytes([block])) == block for block in small)
    pool.check()


def test_groups_of_one_page_size_share_pages() -> None:
    pool = BlockPool([SMALL, KVGroupSpec("twin", "window", 4, 32, {"window": 3})], 32 * 5)
    one, two = take(pool, 2, 2)
    assert not set(one) & set(two)
    assert pool.cache(0, one[0], b"k")
    assert pool.cache(1, two[0], b"k")  # the same prefix, another group
    assert (pool.lookup(0, b"k"), pool.lookup(1, b"k")) == (one[0], two[0])


# ---- fuzz ---------------------------------------------------------------------------------------


class OracleMachine(RuleBasedStateMachine):
    """One page size against an exact model: a list of blanks, a list of cached, counts."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.pool = pool_of(size)
        self.blank = list(range(size, 0, -1))  # last one goes first
        self.lru: list[int] = []
        self.refs: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.next_key = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        room = len(self.blank) + len(self.lru)
        assert self.pool.can_allocate([count]) == (count <= room)
        got = self.pool.allocate([count])
        if count > room:
            assert got is None
            return
        assert got is not None
        for block in got[0]:
            want = self.blank.pop() if self.blank else self.lru.pop(0)
            assert block == want
            self.keys.pop(block, None)
            self.refs[block] = 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.free(0, [*blocks, 0])
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                (self.lru if block in self.keys else self.blank).append(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), fresh=st.booleans())
    def cache(self, data: st.DataObject, fresh: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        key = b"%d" % self.next_key if fresh or not self.next_key else b"%d" % (self.next_key - 1)
        self.next_key += fresh
        free_key = key not in self.keys.values() and block not in self.keys
        assert self.pool.cache(0, block, key) == free_key
        if free_key:
            self.keys[block] = key

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        self.pool.touch(0, [block])
        if block in self.lru:
            self.lru.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.refs)
        if not self.refs:
            size = len(self.blank) + len(self.lru)
            self.blank, self.lru, self.keys = list(range(size, 0, -1)), [], {}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for block, count in self.refs.items():
            assert self.pool.ref_count(0, block) == count
        for block, key in self.keys.items():
            assert self.pool.lookup(0, key) == block
        assert self.pool.num_cached == len(self.keys)


class ClassesMachine(RuleBasedStateMachine):
    """Several page sizes: what is held keeps the bytes that its holder wrote."""

    @initialize(
        sizes=st.lists(st.sampled_from([8, 16, 24, 40, 56]), min_size=2, max_size=4),
        scale=st.integers(3, 12),
    )
    def start(self, sizes: list[int], scale: int) -> None:
        groups = [KVGroupSpec(f"g{i}", "full", 4, size) for i, size in enumerate(sizes)]
        try:
            self.pool = BlockPool(groups, scale * sum(sizes) + 2 * max(sizes))
        except ResourceError:
            self.pool = BlockPool(groups, 10_000)
        self.memory = bytearray(20_000)
        self.held: list[tuple[int, int, int]] = []  # (group, block, stamp)
        self.cached: dict[tuple[int, bytes], int] = {}
        self.stamp = 0

    def _span(self, group: int, block: int) -> slice:
        size = self.pool.groups[group].page_bytes
        return slice(block * size, (block + 1) * size)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        groups = len(self.pool.groups)
        needs = data.draw(st.lists(st.integers(0, 4), min_size=groups, max_size=groups))
        possible = self.pool.can_allocate(needs)
        got = self.pool.allocate(needs)
        assert (got is not None) == possible
        if not self.held:
            assert possible == self.pool.fits_empty(needs)
        for group, ids in enumerate(got or []):
            assert len(ids) == needs[group]
            for block in ids:
                self.stamp = self.stamp % 250 + 1
                span = self._span(group, block)
                assert span.start >= max(g.page_bytes for g in self.pool.groups)
                self.memory[span] = bytes([self.stamp]) * (span.stop - span.start)
                self.held.append((group, block, self.stamp))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def free(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        group, block, stamp = self.held.pop(index)
        if keep:
            key = b"%d-%d" % (self.pool.generation(group, block), block)
            if self.pool.cache(group, block, key):
                self.cached[group, key] = stamp
        self.pool.free(group, [block])

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        group, key = data.draw(st.sampled_from(sorted(self.cached)))
        block = self.pool.lookup(group, key)
        if block is None:
            del self.cached[group, key]  # evicted
            return
        self.pool.touch(group, [block])
        self.held.append((group, block, self.cached[group, key]))

    @invariant()
    def bytes_are_intact(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for group, block, stamp in self.held:
            assert set(self.memory[self._span(group, block)]) == {stamp}


TestOracle = OracleMachine.TestCase
TestClasses = ClassesMachine.TestCase
TestOracle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestClasses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
