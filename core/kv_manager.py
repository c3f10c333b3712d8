"""Block lists of requests over all KV groups: hits, reservations, early release, caching.

Between the scheduler, which thinks in tokens of a request, and the pool, which knows blocks: the
rules of each group come from its `kv_kinds` plugin. Everything here is all or nothing over the
groups. Writes the block fields of `RequestState` and nothing else of it.

Source: spec/scheduler.md 10, 11; spec/attention.md 17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cardcage.core.contracts import KVKind
from cardcage.core.errors import ConfigError, ResourceError
from cardcage.core.kv_blocks import BlockPool
from cardcage.core.prefix_keys import extend_keys, root_key
from cardcage.core.request_state import RequestState
from cardcage.core.scheduler_config import SchedulerConfig
from cardcage.core.types import KVCapacity

# A request's list grew: (request, group, first new logical block, new ids).
Growth = tuple[RequestState, int, int, list[int]]
_CACHE_EVERY = 4  # units between two calls of cache_full for a decoding request


class KVManager:
    """Holds blocks for requests.

    `unit` is the number of tokens one prefix key covers (the greatest common divisor of the
    block sizes), `align` the granularity of hits (their least common multiple).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: KVCapacity,
        kinds: Sequence[KVKind],
        max_model_len: int,
    ) -> None:
        if len(kinds) != len(capacity.groups):
            raise ConfigError(f"{len(capacity.groups)} KV groups but {len(kinds)} kinds")
        self.config, self.kinds = config, tuple(kinds)
        self.pool = BlockPool(capacity.groups, capacity.pool_bytes)
        self.sizes = [g.block_size for g in capacity.groups]
        self.unit = math.gcd(*self.sizes) or max_model_len
        self.align = math.lcm(*self.sizes)
        self.caching = config.prefix_caching and any(k.cacheable() for k in kinds)
        self.num_releases = 0  # tells a request that did not fit when to look again
        far = 2 * max_model_len + max(self.sizes, default=1)
        self._windowed = [g for g, kind in enumerate(kinds) if kind.first_live_block(far)]
        self._keep_bytes = math.ceil(config.watermark * self.pool.total_bytes)
        self.max_fit_len = self._longest_fit(max_model_len)

    def _peak(self, num_tokens: int) -> list[int]:
        """Blocks of each group that a request holds at most while reaching `num_tokens`."""
        return [k.max_live_blocks(num_tokens, self.config.in_flight_tokens) for k in self.kinds]

    def _longest_fit(self, max_model_len: int) -> int:
        """The longest request, prompt and outputs, that the empty pool can hold.

        The last output is never computed, so length L needs KV for max(L - 1, 1) tokens. The
        blocks of a window that has moved may straddle one frame more than they would fill.
        """
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            tokens = max(middle - 1, 1)
            moved = sum(kind.first_live_block(tokens) > 0 for kind in self.kinds)
            if self.pool.fits_empty(self._peak(tokens), slack=moved):
                low = middle
            else:
                high = middle - 1
        if low == 0:
            raise ResourceError(
                "the KV pool cannot hold one token of every group with what is in flight; raise "
                "kv.bytes, or lower kv.block_size or scheduler.max_num_batched_tokens"
            )
        return low

    # ---- holding --------------------------------------------------------------------------------

    def reserve(self, wants: Sequence[tuple[RequestState, int, int]]) -> list[Growth] | None:
        """Cover tokens [0, num_tokens) in every group for all (state, num_tokens, confirmed).

        All or nothing: None means that no new block was taken. Blocks that windows left behind
        go back first. They are known by the confirmed position alone: rows in flight read
        relative to their own, later, positions.
        """
        needs = [0] * len(self.kinds)
        short: list[tuple[RequestState, int, int]] = []
        for state, num_tokens, confirmed in wants:
            if self._windowed:
                self._release_left_behind(state, confirmed)
            for group, kind in enumerate(self.kinds):
                missing = kind.num_blocks(num_tokens) - len(state.block_ids[group])
                if missing > 0:
                    needs[group] += missing
                    short.append((state, group, missing))
        fresh = self.pool.allocate(needs)
        if fresh is None:
            return None
        grown: list[Growth] = []
        for state, group, missing in short:
            ids, fresh[group] = fresh[group][:missing], fresh[group][missing:]
            held = state.block_ids[group]
            grown.append((state, group, len(held), ids))
            held += ids
        return grown

    def covered(self, state: RequestState, num_tokens: int) -> int:
        """Tokens that the held blocks have room for, given that `num_tokens` have."""
        edge = -(-num_tokens // self.unit) * self.unit
        for kind, ids in zip(self.kinds, state.block_ids):
            if kind.num_blocks(edge) > len(ids):
                return num_tokens
        return edge

    def _release_left_behind(self, state: RequestState, confirmed: int) -> None:
        for group in self._windowed:
            done, ids = state.num_released[group], state.block_ids[group]
            first = min(self.kinds[group].first_live_block(confirmed), len(ids))
            if first > done:
                if self.caching and first > state.num_keyed[group]:
                    self.cache_full(state, confirmed)
                self.pool.free(group, ids[done:first][::-1])
                ids[done:first] = [0] * (first - done)
                state.num_released[group] = first
                self.num_releases += 1

    def give_back(self, state: RequestState) -> None:
        """Let go of every block, the end of the request first."""
        for group, ids in enumerate(state.block_ids):
            self.pool.free(group, ids[::-1])
        state.forget_blocks()

    def fits_whole(
        self, state: RequestState, num_known: int, first_end: int, beside_others: bool
    ) -> bool:
        """Room for all known tokens, not only for the first row up to `first_end`: a long prompt
        must not start and be preempted half-way. Beside others the watermark stays free."""
        needs = []
        for kind, ids, gone, peak in zip(
            self.kinds, state.block_ids, state.num_released, self._peak(num_known)
        ):
            first_row = kind.num_blocks(first_end) - len(ids)
            needs.append(max(0, first_row, peak - (len(ids) - gone)))
        return self.pool.can_allocate(needs, self._keep_bytes if beside_others else 0)

    # ---- prefix cache ----------------------------------------------------------------------------

    def take_hit(self, state: RequestState) -> int:
        """Find the longest prefix that all groups have and hold its blocks; returns its tokens.

        Every group may shorten the hit; the search goes round until all agree. At least one
        token is left to compute, because its logits are needed. The hit of all groups is held
        before anything is allocated, so that no allocation evicts it.
        """
        if not self.caching or state.needs_whole_prompt:
            return 0
        num_known = len(state.tokens)
        self._extend(state, num_known)
        hit = (num_known - 1) // self.align * self.align
        agreed = group = 0
        while hit and agreed < len(self.kinds):
            size, kind = self.sizes[group], self.kinds[group]
            found = kind.find_hit(self._is_cached(state, group), hit // size) * size
            rounded = found // self.align * self.align
            agreed = agreed + 1 if found == hit else int(found == rounded)
            hit, group = rounded, (group + 1) % len(self.kinds)
        for group, kind in enumerate(self.kinds):
            if kind.cacheable():
                self._hold_hit(state, group, kind.first_live_block(hit), hit // self.sizes[group])
        return hit

    def _hold_hit(self, state: RequestState, group: int, first: int, end: int) -> None:
        first = min(first, end)
        ids = [self.pool.lookup(group, self._key(state, group, i)) for i in range(first, end)]
        found = [block_id for block_id in ids if block_id is not None]
        assert len(found) == len(ids), "a kind's find_hit promised blocks that are not cached"
        self.pool.touch(group, found)
        state.block_ids[group] = [0] * first + found
        state.num_released[group], state.num_keyed[group] = first, end

    def cache_full(self, state: RequestState, confirmed: int) -> int:
        """Make blocks findable that are full of confirmed, kept tokens (drafts never count).

        Decoding completes one block at a time, so the next call is worth its cost only some
        blocks later; windows and the end of the request bring it forward. Returns the confirmed
        count at which to call again.
        """
        done = min(confirmed, len(state.tokens))
        self._extend(state, done)
        for group, kind in enumerate(self.kinds):
            full = done // self.sizes[group]
            if kind.cacheable() and full > state.num_keyed[group]:
                for index in range(state.num_keyed[group], full):
                    if block_id := state.block_ids[group][index]:
                        self.pool.cache(group, block_id, self._key(state, group, index))
                state.num_keyed[group] = full
        return (done // self.unit + _CACHE_EVERY) * self.unit

    def _extend(self, state: RequestState, num_tokens: int) -> None:
        if not state.root:
            state.root = root_key(self.config.root_seed, state.request.root_key)
        extend_keys(state.prefix_keys, state.root, state.tokens, num_tokens, self.unit)

    def _key(self, state: RequestState, group: int, index: int) -> bytes:
        """The key of a group's block: that of the last unit in it."""
        return state.prefix_keys[(index + 1) * (self.sizes[group] // self.unit) - 1]

    def _is_cached(self, state: RequestState, group: int) -> Callable[[int], bool]:
        keys, lookup, per = state.prefix_keys, self.pool.lookup, self.sizes[group] // self.unit
        return lambda index: lookup(group, keys[(index + 1) * per - 1]) is not None
