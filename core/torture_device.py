"""A pretend device for `cardcage torture`: a pure fake model over a KV store that remembers.

The fake model's next token is a hash of the whole prefix, so a token is right only if the right
prefix was read. Each KV cell keeps the hash of the prefix it was written for, each byte range the
block that wrote it last; a row checks every cell that it reads. Plans are applied when they are
submitted, in order, like kernels on one stream; results become visible after a virtual delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import ExecutionError
from cardcage.core.types import (
    KVCapacity,
    KVGroupSpec,
    SamplingParams,
    SlotAdmit,
    StepPlan,
    StepResult,
    TokenLogprob,
)

VOCAB = 61
EOS = 0
_MASK = 2**64 - 1
_POISON = -1


class TortureFailure(BaseException):
    """An invariant is broken. The message starts with a short name of the invariant.

    Not an Exception: what is raised inside a step must pass through the engine's handling.
    """


class VirtualClock:
    """Seconds that pass only when the simulation says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def mix(state: int, value: int) -> int:
    """One step of a 64-bit hash of a sequence."""
    state = (state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return (state ^ state >> 29) * 0x94D049BB133111EB & _MASK


def next_token(prefix_hash: int, seed: int) -> int:
    """The fake model: a token in [0, VOCAB) from the prefix's hash and the request's seed."""
    return mix(prefix_hash, seed) % VOCAB


def guess_token(prefix_hash: int, seed: int) -> int:
    """A draft for the fake model: right two times out of three."""
    truth = next_token(prefix_hash, seed)
    return truth if mix(prefix_hash, 7) % 3 else (truth + 1) % VOCAB


def token_logprob(prefix_hash: int, token: int) -> TokenLogprob:
    """A made-up log-probability that depends on the prefix and the token."""
    return TokenLogprob(token, -(mix(prefix_hash, token) % 1000) / 100, 1)


@dataclass(slots=True)
class _Slot:
    request_id: str
    tokens: list[int]
    hashes: list[int]  # hashes[i]: of tokens[: i + 1]
    computed: int
    prompt_len: int
    params: SamplingParams
    seed: int
    tables: list[list[int]]

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(mix(self.hashes[-1] if self.hashes else 0, token))


@dataclass(slots=True, eq=False)
class FakeTicket:
    """A step in flight; `wait` moves the virtual clock to its end."""

    device: FakeDevice
    ready_s: float
    outcome: StepResult | Exception

    def done(self) -> bool:
        return self.device.clock.now >= self.ready_s

    def wait(self) -> StepResult:
        clock = self.device.clock
        clock.now = max(clock.now, self.ready_s)
        self.device.in_flight.remove(self)
        self.device.num_moves += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class FakeDevice:
    """An `Executor` without a model. `on_plan` sees every plan before it is applied.

    `armed` are faults for coming steps: "row" (StepResult.errors), "rows" (ExecutionError with
    rows), "step" (the whole step fails and leaves garbage), "crash" (a foreign exception),
    "submit" (execute raises). `blamed` collects the requests that may end with an error.
    """

    capacity: KVCapacity
    clock: VirtualClock
    rng: Random
    max_in_flight: int = 2
    on_plan: Callable[[StepPlan], None] = lambda plan: None
    armed: list[str] = field(default_factory=list)
    blamed: set[str] = field(default_factory=set)
    slots: dict[int, _Slot] = field(default_factory=dict)
    in_flight: list[FakeTicket] = field(default_factory=list)
    num_moves: int = 0  # plans taken, results given
    last_ready_s: float = 0.0
    broken: bool = False
    drafts_seen: bool = False
    _cells: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _bytes: list[tuple[int, int] | None] = field(default_factory=list)
    _unit: int = 1

    def __post_init__(self) -> None:
        sizes = [g.page_bytes for g in self.capacity.groups]
        self._unit = math.gcd(*sizes) or 1
        self._bytes = [None] * (self.capacity.pool_bytes // self._unit)

    # ---- the executor contract ------------------------------------------------------------------

    def load(self, source: ModelSource, progress: object = None) -> KVCapacity:
        return self.capacity

    def execute(self, plan: StepPlan) -> FakeTicket:
        """Apply a plan; the ticket is ready after a random virtual time."""
        self.on_plan(plan)
        self.num_moves += 1
        fault = self.armed.pop(0) if self.armed else ""
        if fault == "submit":
            self._blame(plan)
            self.broken = True
            raise ExecutionError("torture: the step was not accepted")
        self._apply_deltas(plan)
        bad_row = self.rng.randrange(plan.num_rows)
        if fault in ("row", "rows"):
            self.blamed.add(self.slots[int(plan.slots[bad_row])].request_id)
        elif fault:
            self._blame(plan)
            self.broken = True
        result = self._run(plan)
        outcome: StepResult | Exception = result
        if fault == "row":
            result.errors[bad_row] = "torture: no finite logit is left"
        elif fault == "rows":
            outcome = ExecutionError("torture: a row failed", rows=(bad_row,))
        elif fault == "step":
            outcome = ExecutionError("torture: the step failed")
        elif fault == "crash":
            outcome = RuntimeError("torture: a foreign exception")
        delay = self.rng.uniform(0.001, 0.004)
        if self.rng.random() < 0.03:
            delay += self.rng.uniform(0.05, 0.4)
        self.last_ready_s = max(self.last_ready_s, self.clock.now) + delay
        ticket = FakeTicket(self, self.last_ready_s, outcome)
        self.in_flight.append(ticket)
        return ticket

    def reset(self) -> None:
        """Forget all slots; the KV store stays."""
        self.slots.clear()
        self.in_flight.clear()
        self.broken = False
        self.num_moves += 1

    def explain(self) -> dict[str, object]:
        return {"device": "fake"}

    def close(self) -> None:
        self.slots.clear()

    def _blame(self, plan: StepPlan) -> None:
        names = {a.slot: a.request_id for a in plan.admits}
        for slot in plan.slots.tolist():
            self.blamed.add(names.get(slot) or self.slots[slot].request_id)

    # ---- applying a plan ------------------------------------------------------------------------

    def _apply_deltas(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            if self.slots.pop(slot, None) is None:
                raise TortureFailure(f"plan: slot {slot} released twice")
        for admit in plan.admits:
            if admit.slot in self.slots:
                raise TortureFailure(f"plan: slot {admit.slot} is taken")
            self.slots[admit.slot] = self._admit(admit)
        for group, slot, first, ids in plan.block_appends:
            table = self.slots[slot].tables[group]
            if first != len(table):
                raise TortureFailure(f"plan: blocks appended at {first}, table has {len(table)}")
            table.extend(ids)

    def _admit(self, admit: SlotAdmit) -> _Slot:
        slot = _Slot(
            admit.request_id,
            [],
            [],
            admit.num_computed,
            admit.prompt_len,
            admit.params,
            admit.seed,
            [list(ids) for ids in admit.block_ids],
        )
        for token in admit.token_ids:
            slot.push(token)
        return slot

    def _run(self, plan: StepPlan) -> StepResult:
        rows = plan.num_rows
        width = 1 + int(plan.num_drafts.max(initial=0))
        result = StepResult(
            plan.step,
            np.zeros((rows, width), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
        )
        lists = (plan.slots, plan.starts, plan.num_tokens, plan.num_drafts, plan.samples)
        for row, (slot_id, start, count, drafts, samples) in enumerate(
            zip(*(a.tolist() for a in lists))
        ):
            slot = self.slots[slot_id]
            guesses = plan.drafts.get(slot_id)
            self.drafts_seen |= drafts > 0 and guesses is None
            if start < slot.computed or (start > slot.computed and not self.drafts_seen):
                raise TortureFailure(
                    f"plan: {slot.request_id} starts at {start}, device is at {slot.computed}"
                )
            if guesses is None:  # a drafter on the device that is often right
                guesses = self._guesses(slot, drafts)
            elif len(guesses) != drafts:
                raise TortureFailure(f"plan: {len(guesses)} ids for {drafts} drafts")
            self._run_row(slot, row, count, guesses, samples, result)
        return result

    def _guesses(self, slot: _Slot, count: int) -> list[int]:
        state, guesses = slot.hashes[-1] if slot.hashes else 0, []
        for _ in range(count):
            guesses.append(guess_token(state, slot.seed))
            state = mix(state, guesses[-1])
        return guesses

    def _run_row(
        self,
        slot: _Slot,
        row: int,
        count: int,
        guesses: Sequence[int],
        samples: bool,
        result: StepResult,
    ) -> None:
        start = slot.computed
        known, drafts = len(slot.tokens), len(guesses)
        if start + count - drafts > known:
            raise TortureFailure(f"plan: {slot.request_id} runs tokens that nobody knows")
        if drafts and start + count - drafts != known:
            raise TortureFailure(f"plan: {slot.request_id} drafts before its last token")
        for guess in guesses:
            slot.push(guess)
        for group, spec in enumerate(self.capacity.groups):
            self._check_reads(slot, group, spec, start)
            self._write(slot, group, spec, start, start + count)
        if slot.params.prompt_logprobs is not None:
            ends = range(start, min(start + count, slot.prompt_len - 1))
            result.prompt_logprobs[row] = [
                token_logprob(slot.hashes[i], slot.tokens[i + 1]) for i in ends
            ]
        del slot.tokens[known:], slot.hashes[known:]
        if not samples:
            slot.computed += count
            return
        if start + count - drafts != known:
            raise TortureFailure(f"plan: {slot.request_id} samples before its last token")
        kept: list[int] = []
        logprobs: list[TokenLogprob] = []
        while len(kept) == 0 or (len(kept) <= drafts and kept[-1] == guesses[len(kept) - 1]):
            token = next_token(slot.hashes[-1], slot.seed)
            logprobs.append(token_logprob(slot.hashes[-1], token))
            kept.append(token)
            slot.push(token)
        result.token_ids[row, : len(kept)] = kept
        result.counts[row], result.rejected[row] = len(kept), drafts + 1 - len(kept)
        slot.computed += count - (drafts + 1 - len(kept))
        if slot.params.logprobs is not None:
            result.logprobs[row] = logprobs

    # ---- the KV store ---------------------------------------------------------------------------

    def _check_reads(self, slot: _Slot, group: int, spec: KVGroupSpec, start: int) -> None:
        window = spec.options.get("window", 0)
        position = max(0, start - window + 1) if window else 0
        size, table = spec.block_size, slot.tables[group]
        if self.broken:
            return
        while position < start:
            block, end = table[position // size], min(start, (position // size + 1) * size)
            cells = self._cells.get((group, block), ())
            at = position % size
            if block == 0 or not self._owns(group, block, spec):
                raise TortureFailure(
                    f"bytes: {slot.request_id} reads block {block} of group {group} at "
                    f"{position}, whose bytes belong to another"
                )
            if list(cells[at : at + end - position]) != slot.hashes[position:end]:
                raise TortureFailure(
                    f"prefix: {slot.request_id} reads another prefix in block {block} of group "
                    f"{group}, positions {position}..{end - 1}"
                )
            position = end

    def _write(self, slot: _Slot, group: int, spec: KVGroupSpec, start: int, end: int) -> None:
        size, table = spec.block_size, slot.tables[group]
        for position in range(start, end):
            index = position // size
            block = table[index] if index < len(table) else 0
            if block == 0:
                raise TortureFailure(
                    f"plan: {slot.request_id} writes position {position} of group {group} "
                    "without a block"
                )
            if position == start or position % size == 0:
                self._own(group, block, spec)
            cells = self._cells[group, block]
            cells[position % size] = _POISON if self.broken else slot.hashes[position]

    def _span(self, block: int, spec: KVGroupSpec) -> tuple[int, int]:
        first = block * spec.page_bytes // self._unit
        return first, first + spec.page_bytes // self._unit

    def _owns(self, group: int, block: int, spec: KVGroupSpec) -> bool:
        first, end = self._span(block, spec)
        return self._bytes[first:end] == [(group, block)] * (end - first)

    def _own(self, group: int, block: int, spec: KVGroupSpec) -> None:
        if (group, block) in self._cells and self._owns(group, block, spec):
            return
        first, end = self._span(block, spec)
        if end > len(self._bytes):
            raise TortureFailure(f"bytes: block {block} of group {group} is beyond the pool")
        self._bytes[first:end] = [(group, block)] * (end - first)
        self._cells[group, block] = [_POISON] * spec.block_size


def fake_stream(prompt: Sequence[int], seed: int) -> Callable[[], int]:
    """The tokens the fake model gives after a prompt, one per call, by itself."""
    state = 0
    for token in prompt:
        state = mix(state, token)

    def draw() -> int:
        nonlocal state
        token = next_token(state, seed)
        state = mix(state, token)
        return token

    return draw
