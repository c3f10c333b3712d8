"""A step while it is being planned, and what is remembered of it while it runs.

`SlotTable` holds the per-slot counters as arrays, so that the work of a steady step does not grow
with Python objects. `PlanDraft` collects rows and turns into a `StepPlan` for the executor and a
`StepRecord` (the step's tickets) for the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cardcage.core.request_state import RequestState
from cardcage.core.types import SlotAdmit, StepPlan

Ints = NDArray[np.int64]


class SlotTable:
    """What changes at every step, one entry per slot. int64 [S] unless noted.

    confirmed: tokens whose KV is computed, by results received.
    known: tokens on the host.
    last: tokens that are ever computed.
    limit: tokens at which the request ends.
    covered: tokens that the held blocks have room for.
    next_full: confirmed count at which complete blocks are worth caching.
    epoch: the tenancy, unlike any other one; 0 = vacant.
    sampled (bool): a row of this tenancy has been planned to sample.
    scores (bool): the tenant samples nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self.confirmed = np.zeros(num_slots, np.int64)
        self.known = np.zeros(num_slots, np.int64)
        self.last = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.covered = np.zeros(num_slots, np.int64)
        self.next_full = np.zeros(num_slots, np.int64)
        self.epoch = np.zeros(num_slots, np.int64)
        self.sampled = np.zeros(num_slots, np.bool_)
        self.scores = np.zeros(num_slots, np.bool_)


@dataclass(slots=True)
class StepRecord:
    """The tickets of one step in flight, one per row. int64 [R] each.

    `epochs` are the slots' tenancies when the step was planned, `starts` optimistic positions
    (all drafts in flight kept), `expected` the tokens a row samples if all its drafts are kept.
    """

    step: int
    slots: Ints
    epochs: Ints
    starts: Ints
    num_tokens: Ints
    expected: Ints

    def live(self, table: SlotTable) -> NDArray[np.bool_]:
        """Which rows still belong to the tenancy that they were planned for. bool [R]."""
        live: NDArray[np.bool_] = table.epoch[self.slots] == self.epochs
        return live


@dataclass(slots=True)
class PrefillRow:
    """Tokens [start, start + num_tokens) of a request, of the `wanted` that it lacks."""

    state: RequestState
    start: int
    num_tokens: int
    wanted: int
    is_new: bool = False


@dataclass(slots=True)
class PlanDraft:
    """Decode rows as arrays (one token and `drafts` each), prefill rows as objects (few)."""

    budget: int
    starts: Ints  # [S] where each slot's next row begins
    slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    drafts: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[PrefillRow] = field(default_factory=list)
    appends: list[tuple[RequestState, int, int, list[int]]] = field(default_factory=list)
    draft_ids: dict[int, list[int]] = field(default_factory=dict)  # slot -> drafts of the host
    preempted: bool = False

    @property
    def left(self) -> int:
        """Tokens of the budget that no row has taken."""
        used = len(self.slots) + int(self.drafts.sum()) + sum(r.num_tokens for r in self.rows)
        return self.budget - used

    def drop(self, state: RequestState) -> None:
        """The request was preempted while planning: its tokens go back to the step."""
        keep = self.slots != state.slot
        self.slots, self.drafts = self.slots[keep], self.drafts[keep]
        self.rows = [row for row in self.rows if row.state is not state]
        self.appends = [item for item in self.appends if item[0] is not state]
        self.draft_ids.pop(state.slot, None)
        self.preempted = True

    def build(
        self, step: int, table: SlotTable, releases: list[int]
    ) -> tuple[StepPlan, StepRecord] | None:
        """The plan and its tickets; None without rows. Rows of one token come first."""
        rows = sorted(self.rows, key=lambda row: row.num_tokens > 1)
        slots = _join(self.slots, [row.state.slot for row in rows])
        if not len(slots):
            return None
        starts = _join(self.starts[self.slots], [row.start for row in rows])
        tokens = _join(self.drafts + 1, [row.num_tokens for row in rows])
        drafts = _join(self.drafts, [0] * len(rows))
        samples = ~table.scores[slots]
        if rows:
            samples[len(self.slots) :] &= [row.num_tokens == row.wanted for row in rows]
        table.sampled[slots] |= samples
        record = StepRecord(step, slots, table.epoch[slots], starts, tokens, (drafts + 1) * samples)
        new = {id(row.state) for row in rows if row.is_new}
        plan = StepPlan(
            step=step,
            slots=slots.astype(np.int32),
            starts=starts.astype(np.int32),
            num_tokens=tokens.astype(np.int32),
            num_drafts=drafts.astype(np.int32),
            samples=samples,
            admits=[_admission(row) for row in rows if row.is_new],
            releases=releases,
            block_appends=[
                (group, state.slot, first, ids)
                for state, group, first, ids in self.appends
                if id(state) not in new
            ],
            drafts=self.draft_ids,
        )
        return plan, record


def _join(decodes: Ints, prefills: list[int]) -> Ints:
    return np.concatenate((decodes, np.array(prefills, np.int64))) if prefills else decodes


def _admission(row: PrefillRow) -> SlotAdmit:
    state, request = row.state, row.state.request
    return SlotAdmit(
        slot=state.slot,
        request_id=request.request_id,
        token_ids=list(state.tokens),
        prompt_len=state.prompt_len,
        num_computed=row.start,
        params=request.params,
        seed=request.seed,
        eos_token_ids=request.eos_token_ids,
        block_ids=tuple(list(ids) for ids in state.block_ids),
    )
