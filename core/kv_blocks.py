"""The KV block pool: who owns which bytes of the one KV buffer, and which blocks hold what prefix.

The buffer is cut in frames; a frame belongs to one *size class* (all groups whose blocks have the
same `page_bytes`) at a time and holds that class's pages. Block id = byte offset // page_bytes,
so ids of different groups never overlap in bytes while their frames differ. Id 0 is the null
block. The pool knows no request, no token and no tensor; the scheduler calls it.

Source: spec/scheduler.md 3, 4, 11; spec/attention.md 17; docs/decisions/0002; the ideas of vLLM's
block pool (free queue order, hash map) and of slab allocators (size classes, page take-over).
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cardcage.core.errors import ResourceError
from cardcage.core.types import KVGroupSpec

_MIN_FRAMES = 16  # fewer frames than this leave nothing to trade between size classes
_U32 = 2**32


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """How a buffer is cut: frame f is bytes [base + f * frame_bytes, + frame_bytes).

    `pages[c]` is how many pages of size class c every frame is used for.
    """

    base: int
    frame_bytes: int
    num_frames: int
    pages: tuple[int, ...]


def plan_frames(pool_bytes: int, page_sizes: Sequence[int]) -> FrameLayout:
    """Choose the frame size that wastes least.

    With one page size a frame is a page and nothing is lost but the null block. With several, the
    least common multiple loses nothing inside a frame; when it is too large for the pool, the
    best multiple of the largest page is taken (at most one page per frame and class is lost at
    frame edges, so larger frames lose less). Frames are what classes trade, so a cut in fewer
    than 16 counts as proportionally worse.

    Args:
        pool_bytes: size of the buffer.
        page_sizes: distinct page sizes in bytes, one per class.

    Raises:
        ResourceError: not even one page of each class fits beside the null blocks.
    """
    if not page_sizes:
        return FrameLayout(0, 1, 0, ())
    largest, common = max(page_sizes), math.lcm(*page_sizes)
    best: tuple[tuple[float, int], FrameLayout] | None = None
    sizes = [common] + ([] if len(page_sizes) == 1 else [largest * k for k in range(1, 65)])
    for frame in sizes:
        base = common if frame == common else largest
        frames = (pool_bytes - base) // frame
        exact = frame == common
        pages = tuple(
            frame // p - (0 if exact or (frame % p == 0 and base % p == 0) else 1)
            for p in page_sizes
        )
        if frames < len(page_sizes) or min(pages) < 1:
            continue
        worst = min(frames * n * p for n, p in zip(pages, page_sizes)) / pool_bytes
        score = (round(worst * min(1.0, frames / _MIN_FRAMES), 3), frames)
        if best is None or score > best[0]:
            best = (score, FrameLayout(base, frame, frames, pages))
    if best is None:
        raise ResourceError(
            f"a KV pool of {pool_bytes} bytes cannot hold one block of each size "
            f"{sorted(page_sizes)} beside the null block; give kv.bytes more memory or use a "
            "smaller kv.block_size"
        )
    return best[1]


class _SizeClass:
    """All pages of one size that frames were given to.

    A page is in `blank` (free, nothing worth keeping, last in first out), in `lru` (free, still
    holds a cached block, oldest first, value = time of its release) or has ref > 0.
    """

    def __init__(self, index: int, page_bytes: int, num_pages: int, pages_per_frame: int) -> None:
        self.index = index
        self.page_bytes = page_bytes
        self.pages_per_frame = pages_per_frame
        self.blank: dict[int, None] = {}
        self.lru: OrderedDict[int, int] = OrderedDict()
        self.idle: OrderedDict[int, int] = OrderedDict()  # owned frames with no page in use
        self.ref = array("I", bytes(4 * num_pages))
        self.generation = array("I", bytes(4 * num_pages))
        self.key_of: dict[int, tuple[int, bytes]] = {}  # page -> (group, key)

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.lru)


class BlockPool:
    """Ref counts, free lists, the prefix cache and the frames under them. O(1) per block.

    Invariants (`check` verifies them): a page is in exactly one of blank, lru, in use; only
    confirmed full blocks have a key; a frame with a page in use is never taken over; pages of
    different classes never overlap in bytes.
    """

    def __init__(self, groups: Sequence[KVGroupSpec], pool_bytes: int) -> None:
        self.groups = tuple(groups)
        sizes = tuple(dict.fromkeys(g.page_bytes for g in self.groups))
        self.layout = plan_frames(pool_bytes, sizes)
        self.classes = [
            _SizeClass(i, size, pool_bytes // size, self.layout.pages[i])
            for i, size in enumerate(sizes)
        ]
        self._class_of = [self.classes[sizes.index(g.page_bytes)] for g in self.groups]
        self._cached: list[dict[bytes, int]] = [{} for _ in self.groups]
        self._shared = len(sizes) > 1  # frames change hands only between classes
        frames = self.layout.num_frames if self._shared else 0
        self._used, self._keyed = array("I", bytes(4 * frames)), array("I", bytes(4 * frames))
        self._owner = [-1] * frames
        self._returned: list[int] = []
        self._next_frame = 0
        self._tick = 0
        self._used_bytes = 0
        self.total_bytes = self.layout.num_frames * self.layout.frame_bytes
        self.num_evictions = 0

    # ---- figures ------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the pool's bytes that requests hold, 0..1. Cached free blocks do not count."""
        return self._used_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def free_bytes(self) -> int:
        """Bytes that no request holds, evictable cache included."""
        return self.total_bytes - self._used_bytes

    def num_blocks(self, group: int) -> int:
        """Blocks that `group` could hold if it had the whole pool."""
        return self.layout.num_frames * self._class_of[group].pages_per_frame

    def usable_bytes(self, group: int) -> int:
        """Bytes of `num_blocks`: the pool less the null block and what frames lose at edges."""
        return self.num_blocks(group) * self.groups[group].page_bytes

    def fits_empty(self, needs: Sequence[int], slack: int = 0) -> bool:
        """Whether an empty pool can hold `needs[g]` blocks of each group g, `slack` frames over."""
        owed = self._owed(needs)
        frames = sum(-(-n // c.pages_per_frame) for n, c in zip(owed, self.classes))
        return frames + (slack if self._shared else 0) <= self.layout.num_frames

    def generation(self, group: int, block_id: int) -> int:
        """u32 that changes each time the block is handed out or its bytes change owner."""
        return self._class_of[group].generation[block_id]

    def ref_count(self, group: int, block_id: int) -> int:
        """Requests that hold the block."""
        return self._class_of[group].ref[block_id]

    # ---- taking and giving back ---------------------------------------------------------------

    def can_allocate(self, needs: Sequence[int], keep_bytes: int = 0) -> bool:
        """Whether `allocate(needs)` would succeed and leave at least `keep_bytes` free."""
        if self._spare_frames(self._owed(needs)) < 0:
            return False
        if not keep_bytes:
            return True
        wanted = sum(n * g.page_bytes for n, g in zip(needs, self.groups))
        return self.free_bytes - wanted >= keep_bytes

    def allocate(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Hand out `needs[g]` blocks of each group g, all or nothing (None: not enough).

        Blank pages go first, then new frames, then the least recently released cached block,
        whichever class it belongs to (another class gives whole idle frames only). Returns ids
        per group, each with ref 1 and a new generation. Contents are not cleared.
        """
        owed = self._owed(needs)
        if self._spare_frames(owed) < 0:
            return None
        if self._shared:
            # Frames move before any page is taken: taking pages in order of age would break up
            # the idle frames that were counted on.
            for cls in self.classes:
                while cls.num_free < owed[cls.index]:
                    frame = self._find_frame(cls, owed, None)
                    assert frame is not None, "_spare_frames counted a frame that is not there"
                    self._give(cls, frame)
        out: list[list[int]] = []
        for cls, count in zip(self._class_of, needs):
            ids: list[int] = []
            for _ in range(count):
                ids.append(self._take(cls, owed))
                owed[cls.index] -= 1
            out.append(ids)
        return out

    def touch(self, group: int, block_ids: Sequence[int]) -> None:
        """Hold blocks that `lookup` found: they can no longer be evicted. 0 is skipped."""
        cls = self._class_of[group]
        for block_id in block_ids:
            if not block_id:
                continue
            if not cls.ref[block_id]:
                del cls.lru[block_id]
                self._used_bytes += cls.page_bytes
                if self._shared:
                    self._note_use(cls, block_id)
            cls.ref[block_id] += 1

    def free(self, group: int, block_ids: Sequence[int]) -> None:
        """Let go of blocks, in this order; 0 is skipped.

        A request passes its blocks in reverse, so that the end of its prompt is evicted before the
        beginning. Blocks without a key are reused first.
        """
        cls = self._class_of[group]
        self._tick += 1
        for block_id in block_ids:
            if not block_id:
                continue
            left = cls.ref[block_id] - 1
            if left < 0:
                raise AssertionError(f"double free of block {block_id} of group {group}")
            cls.ref[block_id] = left
            if left:
                continue
            if block_id in cls.key_of:
                cls.lru[block_id] = self._tick
            else:
                cls.blank[block_id] = None
            self._used_bytes -= cls.page_bytes
            if self._shared:
                frame = self._frame_of(cls, block_id)
                self._used[frame] -= 1
                if not self._used[frame]:
                    self._rest(cls, frame)

    # ---- prefix cache -------------------------------------------------------------------------

    def lookup(self, group: int, key: bytes) -> int | None:
        """The block of `group` that holds the prefix `key`, or None. `touch` it before use."""
        return self._cached[group].get(key)

    def cache(self, group: int, block_id: int, key: bytes) -> bool:
        """Make a held, full, confirmed block findable. False when its key is already known.

        Two requests may compute the same content at the same time; ids already handed out are
        never merged, and the first block keeps the key.
        """
        cls, table = self._class_of[group], self._cached[group]
        if key in table or block_id in cls.key_of:
            return False
        table[key] = block_id
        cls.key_of[block_id] = (group, key)
        if self._shared:
            self._keyed[self._frame_of(cls, block_id)] += 1
        return True

    def reset(self) -> bool:
        """Forget every cached block. False, and nothing happens, while a block is held."""
        if self._used_bytes:
            return False
        for cls in self.classes:
            for frame, owner in enumerate(self._owner):
                if owner == cls.index:
                    self._retire(cls, frame)
            cls.blank.clear()
            cls.lru.clear()
            cls.idle.clear()
            cls.key_of.clear()
        for table in self._cached:
            table.clear()
        self._owner = [-1] * len(self._owner)
        self._keyed = array("I", bytes(4 * len(self._owner)))
        self._returned.clear()
        self._next_frame = 0
        return True

    @property
    def num_cached(self) -> int:
        """Blocks with a key, held or not."""
        return sum(len(table) for table in self._cached)

    # ---- inside -------------------------------------------------------------------------------

    def _owed(self, needs: Sequence[int]) -> list[int]:
        if not self._shared:
            return [sum(needs)]
        owed = [0] * len(self.classes)
        for cls, count in zip(self._class_of, needs):
            owed[cls.index] += count
        return owed

    def _spare_frames(self, owed: Sequence[int]) -> int:
        """Frames left over once every class has its `owed` pages; negative: not enough."""
        spare = self.layout.num_frames - self._next_frame + len(self._returned)
        for cls, need in zip(self.classes, owed):
            over = len(cls.blank) + len(cls.lru) - need
            # floor division: over < 0 counts the frames the class lacks, over > 0 those it may
            # give, of which only the idle ones can move.
            frames = over // cls.pages_per_frame
            spare += frames if frames < 0 else min(frames, len(cls.idle))
        return spare

    def _take(self, cls: _SizeClass, owed: Sequence[int]) -> int:
        if not cls.blank and (self._shared or self._next_frame < self.layout.num_frames):
            # A blank page elsewhere, or an older cached one, is a better loss than our own oldest.
            oldest = next(iter(cls.lru.values())) if cls.lru else None
            frame = self._find_frame(cls, owed, oldest)
            if frame is not None:
                self._give(cls, frame)
        if cls.blank:
            block_id = cls.blank.popitem()[0]
        else:
            block_id, _ = cls.lru.popitem(last=False)
            self._forget(cls, block_id)
        cls.ref[block_id] = 1
        cls.generation[block_id] = (cls.generation[block_id] + 1) % _U32
        self._used_bytes += cls.page_bytes
        if self._shared:
            self._note_use(cls, block_id)
        return block_id

    def _find_frame(
        self, cls: _SizeClass, owed: Sequence[int], older_than: int | None
    ) -> int | None:
        """A frame that no class owns, else the longest idle one of a class that keeps its `owed`.

        With `older_than` an owned frame must have been idle since before that time.
        """
        if self._returned:
            return self._returned.pop()
        if self._next_frame < self.layout.num_frames:
            self._next_frame += 1
            return self._next_frame - 1
        donors = [
            d
            for d in self.classes
            if d is not cls and d.idle and d.num_free - owed[d.index] >= d.pages_per_frame
        ]
        if not donors:
            return None
        donor = min(donors, key=lambda d: next(iter(d.idle.values())))
        frame, since = next(iter(donor.idle.items()))
        if older_than is not None and since >= older_than:
            return None
        self._retire(donor, frame)
        return frame

    def _frame_of(self, cls: _SizeClass, block_id: int) -> int:
        return (block_id * cls.page_bytes - self.layout.base) // self.layout.frame_bytes

    def _pages(self, cls: _SizeClass, frame: int) -> range:
        start = self.layout.base + frame * self.layout.frame_bytes
        first = -(-start // cls.page_bytes)
        return range(first, first + cls.pages_per_frame)

    def _give(self, cls: _SizeClass, frame: int) -> None:
        """The class owns the frame from now on; its lowest page is used first."""
        for block_id in reversed(self._pages(cls, frame)):
            cls.blank[block_id] = None
        if self._shared:
            self._owner[frame] = cls.index
            cls.idle[frame] = self._tick

    def _retire(self, cls: _SizeClass, frame: int) -> None:
        """Take an idle frame away from its class: cached blocks go, stale holders can see it."""
        for block_id in self._pages(cls, frame):
            if block_id in cls.lru:
                del cls.lru[block_id]
                self._forget(cls, block_id)
            else:
                del cls.blank[block_id]
            cls.generation[block_id] = (cls.generation[block_id] + 1) % _U32
        cls.idle.pop(frame, None)
        self._owner[frame] = -1

    def _rest(self, cls: _SizeClass, frame: int) -> None:
        """The last page in use of a frame was freed."""
        if self._keyed[frame]:
            cls.idle[frame] = self._tick
        else:
            self._retire(cls, frame)
            self._returned.append(frame)

    def _note_use(self, cls: _SizeClass, block_id: int) -> None:
        """A page of the frame went from free to held."""
        frame = self._frame_of(cls, block_id)
        self._used[frame] += 1
        if self._used[frame] == 1:
            cls.idle.pop(frame, None)

    def _forget(self, cls: _SizeClass, block_id: int) -> None:
        group, key = cls.key_of.pop(block_id)
        del self._cached[group][key]
        self.num_evictions += 1
        if self._shared:
            self._keyed[self._frame_of(cls, block_id)] -= 1

    def check(self) -> None:
        """Verify every invariant; AssertionError names the first that is broken. O(pages)."""
        used_bytes, spans = 0, []
        for cls in self.classes:
            blank, lru = set(cls.blank), set(cls.lru)
            held = {i for i, ref in enumerate(cls.ref) if ref}
            states = len(blank) + len(lru) + len(held)
            assert states == len(blank | lru | held), "a page is in two states"
            assert 0 not in blank | lru | held, "the null block was handed out"
            assert lru == set(cls.key_of) - held, "lru is not the set of free cached pages"
            used_bytes += len(held) * cls.page_bytes
            spans += [(i * cls.page_bytes, cls.page_bytes) for i in blank | lru | held]
            if self._shared:
                owned = [f for f, o in enumerate(self._owner) if o == cls.index]
                pages = {p for f in owned for p in self._pages(cls, f)}
                assert pages == blank | lru | held, "pages and frames disagree"
                idle = {f for f in owned if not held & set(self._pages(cls, f))}
                assert idle == set(cls.idle), "idle frames are not those without a page in use"
        assert used_bytes == self._used_bytes, "used bytes drifted"
        spans.sort()
        for (start, size), (following, _) in pairwise(spans):
            assert start + size <= following, "two blocks overlap in bytes"
        for group, table in enumerate(self._cached):
            for key, block_id in table.items():
                assert self._class_of[group].key_of.get(block_id) == (group, key), "cache map"
        assert sum(map(len, self._cached)) == sum(len(c.key_of) for c in self.classes)
