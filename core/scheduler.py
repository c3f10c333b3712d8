"""The scheduler: which request computes how many tokens in the next step, and in which blocks.

There is no prefill or decode phase: a request has tokens that are known (or expected from steps in
flight) and tokens whose KV is computed; a step gives it some of the difference. Requests are
in one of three places: *waiting* (runnable, in policy order), *running* (holds a slot and blocks)
or *parked* (waits for an event, holds nothing). `schedule` makes a `StepPlan`, `commit` takes its
result. A pure state machine: the clock is an argument, nothing is random, nothing blocks.

Counters ahead of the device are derived from the tickets in flight. A slot's tenancy has an epoch
that no other tenancy ever has; a result row whose epoch is no longer that of its slot is dropped,
whatever became of its request.

Source: spec/scheduler.md 5-7, 17; studied: vLLM's V1 scheduler and its public bug reports.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cardcage.core.contracts import DraftAsk, KVKind
from cardcage.core.drafting import Drafter
from cardcage.core.errors import ContextTooLong, EngineDead, InvalidRequest
from cardcage.core.kv_manager import KVManager
from cardcage.core.outputs import Committed, append_tokens, collect_prompt_logprobs, stop_tokens
from cardcage.core.request_queue import BY_KEY, RequestQueue
from cardcage.core.request_state import RequestState
from cardcage.core.scheduler_config import Constraint, Pause, SchedulerConfig
from cardcage.core.step_draft import Ints, PlanDraft, PrefillRow, SlotTable, StepRecord
from cardcage.core.types import (
    EngineStats,
    FinishReason,
    KVCapacity,
    Request,
    RequestStatus,
    StepPlan,
    StepResult,
)

__all__ = ["Constraint", "Pause", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Requests in, step plans out. One thread; see the module's docstring for the model.

    Args:
        config: the scheduler's numbers.
        capacity: groups, bytes, slots and context that the executor offers.
        kinds: the rules of each KV group, in the order of `capacity.groups`.
        clock: monotonic seconds.
        constraints: plugins that may shorten a row.
        draft_budget: how many drafts of its own the executor may verify for a decoding request.
        drafter: proposes drafts on the host; plans then carry them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: KVCapacity,
        kinds: Sequence[KVKind],
        clock: Callable[[], float],
        constraints: Sequence[Constraint] = (),
        draft_budget: Callable[[Request], int] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config, self.capacity = config, capacity
        self.constraints, self.draft_budget = tuple(constraints), draft_budget
        self.drafter = drafter
        self.max_model_len = min(config.max_model_len, capacity.max_model_len)
        self.max_running = min(
            config.max_num_seqs, capacity.max_slots, config.max_num_batched_tokens
        )
        self.kv = KVManager(config, capacity, kinds, self.max_model_len)
        self.pause = Pause.NONE
        self.states: dict[str, RequestState] = {}
        self.queue = RequestQueue(config)
        self.waiting, self.parked = self.queue.waiting, self.queue.parked
        self.running: list[RequestState] = []  # sorted by key
        self.outstanding: deque[StepRecord] = deque()
        self.table = SlotTable(capacity.max_slots)
        self._clock = clock
        self._stats = EngineStats()
        self._tenants: list[RequestState | None] = [None] * capacity.max_slots
        self._free_slots = list(range(capacity.max_slots - 1, -1, -1))
        self._releases: list[int] = []
        self._ended: list[RequestState] = []
        self._arrivals = self._epochs = self._steps = 0
        self._order: Ints | None = None

    # ---- arrival, parking, the end --------------------------------------------------------------

    def add(self, request: Request) -> RequestState:
        """Queue a request, or say why it can never run (or not now).

        Raises:
            InvalidRequest: no tokens, an id in use, or more KV memory than the whole pool has.
            ContextTooLong: the prompt leaves no room to generate.
            AdmissionError: the queue is full.
        """
        if request.request_id in self.states:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        max_len = self._length_limit(request)
        self.queue.check_room(len(request.prompt_token_ids))
        rank = request.priority if self.config.policy == "priority" else 0
        state = RequestState(
            request=request,
            key=(rank, self._arrivals),
            max_len=max_len,
            stops=stop_tokens(request),
            num_groups=len(self.kv.kinds),
        )
        self._arrivals += 1
        self.states[request.request_id] = state
        self.queue.push(state)
        return state

    def _length_limit(self, request: Request) -> int:
        """Prompt + outputs at which the request ends. What can never fit is refused here."""
        prompt_len, asked = len(request.prompt_token_ids), request.params.max_tokens
        if not prompt_len:
            raise InvalidRequest("the prompt has no tokens; give at least one", "prompt")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= 2**31:
            raise InvalidRequest("prompt token ids must be in [0, 2**31)", "prompt")
        if prompt_len + (asked != 0) > self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {prompt_len} tokens and the context {self.max_model_len}, which "
                "must hold at least one output as well; shorten the prompt",
                "prompt",
            )
        wanted = self.max_model_len if asked is None else prompt_len + asked
        max_len, fits = min(wanted, self.max_model_len), self.kv.max_fit_len
        if max_len <= fits:
            return max_len
        if prompt_len + (asked != 0) > fits:
            raise ContextTooLong(
                f"the prompt has {prompt_len} tokens, but KV memory holds a request of at most "
                f"{fits}; shorten the prompt or raise kv.bytes",
                "prompt",
            )
        if asked is not None:
            raise InvalidRequest(
                f"max_tokens {asked} after a prompt of {prompt_len} tokens needs KV memory for "
                f"{max_len} tokens, and it holds a request of at most {fits}; lower max_tokens "
                "or raise kv.bytes",
                "max_tokens",
            )
        return fits

    def park(
        self, request_id: str, reason: str, deadline_s: float, on_deadline: str = "fail"
    ) -> None:
        """Take a live request out of scheduling until `wake` or the deadline (engine clock).

        A running request gives back its slot and blocks, so that it is in nobody's way; what it
        computed usually stays in the prefix cache. At the deadline the request fails with
        `reason` ("fail") or becomes runnable ("wake"). No effect on ids that are not live.
        """
        if on_deadline not in ("fail", "wake"):
            raise ValueError(f"on_deadline must be 'fail' or 'wake', got {on_deadline!r}")
        state = self.states.get(request_id)
        if state is None:
            return
        self._remove(state)
        self.queue.park(state, reason, deadline_s, fails=on_deadline == "fail")

    def wake(self, request_id: str) -> bool:
        """The event that a parked request waited for has come. False if it was not parked."""
        state = self.parked.get(request_id)
        if state is None:
            return False
        self.queue.remove(state)
        self.queue.push(state)
        return True

    def next_deadline_s(self) -> float | None:
        """When the next parked request runs out of time, engine clock; None without any."""
        return self.queue.next_deadline_s()

    def _wake_due(self, now: float) -> None:
        while (due := self.queue.pop_due(now)) is not None:
            request_id, fails = due
            if fails:
                reason = self.parked[request_id].park_reason
                self.fail(request_id, f"{reason}: not done before its deadline")
            else:
                self.wake(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End live requests with reason "abort"; ids that are not live are ignored."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is not None:
                self._end(state, RequestStatus.CANCELLED, FinishReason.ABORT)
                self._ended.append(state)

    def fail(self, request_id: str, error: str) -> None:
        """End a live request with a sentence that says why."""
        state = self.states.get(request_id)
        if state is not None:
            state.error = error
            self._end(state, RequestStatus.FAILED, FinishReason.ERROR)
            self._ended.append(state)

    def drain_ended(self) -> list[RequestState]:
        """Requests that ended outside `commit` since the last call, each exactly once."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, state: RequestState, status: RequestStatus, reason: FinishReason) -> None:
        self._remove(state)
        del self.states[state.request_id]
        state.status, state.finish_reason = status, reason
        finished = self._stats.finished
        finished[reason.value] = finished.get(reason.value, 0) + 1

    def _remove(self, state: RequestState) -> None:
        """Take a live request out of the place it is in, giving back what it holds."""
        if state.status is RequestStatus.RUNNING:
            self._vacate(state)
        else:
            self.queue.remove(state)

    def _vacate(self, state: RequestState) -> None:
        """Give back blocks and slot. Rows in flight are orphaned by the epoch; devices execute
        plans in order, so any later plan may reuse both."""
        if self.kv.caching and state.error is None:
            self.kv.cache_full(state, int(self.table.confirmed[state.slot]))
        self.kv.give_back(state)
        self.kv.num_releases += 1
        del self.running[bisect_left(self.running, state.key, key=BY_KEY)]
        self._tenants[state.slot] = None
        self.table.epoch[state.slot] = 0
        if self.drafter is not None:
            self.drafter.release(state.slot, state.tokens)
        self._releases.append(state.slot)
        self._free_slots.append(state.slot)
        state.slot, self._order = -1, None

    # ---- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can run now."""
        now = self._clock()
        self._wake_due(now)
        if self.pause is Pause.ALL or not (self.running or self.waiting):
            return None
        if self.outstanding and self.drafter is not None and self.drafter.drafting:
            return None  # drafts follow the last token, which is still on its way
        starts, lacking = self._demand()
        order = self._slots_in_order()
        counts = lacking[order]
        prefills = order[counts > 1].tolist()
        admitting = self._may_admit()
        claims = len(prefills) + (len(self.waiting) if admitting else 0)
        draft = PlanDraft(self.config.max_num_batched_tokens, starts)
        threshold = self.config.long_prefill_token_threshold
        share = max(threshold, draft.budget // 2, 1) if claims > 1 else draft.budget
        self._plan_decodes(draft, order[counts == 1], crowded=claims > 0)
        for slot in prefills:
            state = self._tenants[slot]
            if state is not None:  # else preempted for a row before it
                self._plan_prefill(draft, state, int(lacking[slot]), share)
        if admitting and not draft.preempted:
            self._admit(draft, share, now)
        self._top_up(draft)
        return self._issue(draft)

    def _slots_in_order(self) -> Ints:
        if self._order is None:
            self._order = np.array([s.slot for s in self.running], np.int64)
        return self._order

    def _demand(self) -> tuple[Ints, Ints]:
        """Per slot [S]: where its next row starts if all goes well, and how many tokens it lacks.

        Requests whose tokens in flight already reach their limit lack nothing.
        """
        table = self.table
        starts, target = table.confirmed.copy(), table.known.copy()
        for record in self.outstanding:
            live = record.live(table)
            slots = record.slots[live]
            starts[slots] += record.num_tokens[live]
            target[slots] += record.expected[live]
        return starts, np.minimum(target, table.last) - starts

    def _plan_decodes(self, draft: PlanDraft, slots: Ints, crowded: bool) -> None:
        """Rows of one token first: all of them fit, because max_running is within the budget."""
        draft.slots, draft.drafts = slots, np.zeros(len(slots), np.int64)
        drafter = self.drafter
        drafting = drafter is not None and drafter.drafting and not self.outstanding
        if self.draft_budget is not None or self.constraints or drafting:
            left = draft.left // 2 if crowded else draft.left
            if drafter is not None and drafting:
                draft.draft_ids = drafter.propose(self._asks(draft), len(slots), left)
            self._fit_decodes(draft, left)
        wants = self._uncovered(draft)
        if wants and not self._reserve(draft, wants):
            if draft.draft_ids:  # nobody is preempted for a guess
                draft.draft_ids, draft.drafts = {}, np.zeros_like(draft.drafts)
                wants = self._uncovered(draft)
            for state, end in wants:
                if state.slot >= 0:  # else preempted for a row before it
                    self._reserve_or_preempt(draft, state, end)

    def _uncovered(self, draft: PlanDraft) -> list[tuple[RequestState, int]]:
        """Decode rows that end beyond the blocks of their request, and where they end."""
        ends = draft.starts[draft.slots] + draft.drafts + 1
        short = ends > self.table.covered[draft.slots]
        wants: list[tuple[RequestState, int]] = []
        for slot, end in zip(draft.slots[short].tolist(), ends[short].tolist()):
            state = self._tenants[slot]
            assert state is not None
            wants.append((state, end))
        return wants

    def _asks(self, draft: PlanDraft) -> list[DraftAsk]:
        """What a drafter is asked: every decode row that has sampled before, and its room."""
        assert self.drafter is not None
        most, asks = self.drafter.policy.k, []
        for slot in draft.slots[self.table.sampled[draft.slots]].tolist():
            state = self._tenants[slot]
            assert state is not None
            room = int(self.table.last[slot] - draft.starts[slot]) - 1
            asks.append(DraftAsk(slot, state.tokens, min(room, most)))
        return asks

    def _fit_decodes(self, draft: PlanDraft, left: int) -> None:
        """Add drafts to rows, `left` in all, and let constraints shorten or skip rows."""
        found: list[tuple[int, int]] = []
        ids = draft.draft_ids
        for slot in draft.slots.tolist():
            state, start, drafts = self._tenants[slot], int(draft.starts[slot]), 0
            assert state is not None
            if slot in ids:
                drafts = len(ids[slot])
            elif self.draft_budget is not None and self.table.sampled[slot]:
                room = int(self.table.last[slot]) - start - 1
                drafts = max(0, min(self.draft_budget(state.request), left, room))
            drafts = self._limit(state, start, 1 + drafts) - 1
            if slot in ids:
                del ids[slot][max(0, drafts) :]
                if not ids[slot]:
                    del ids[slot]
            if drafts >= 0:
                found.append((slot, drafts))
                left -= drafts
        found.sort(key=lambda row: row[1] > 0)  # rows of one token first
        both = np.array(found, np.int64).reshape(-1, 2)
        draft.slots, draft.drafts = both[:, 0], both[:, 1]

    def _limit(self, state: RequestState, start: int, num_tokens: int) -> int:
        for constraint in self.constraints:
            if num_tokens <= 0:
                break
            window = range(start, start + num_tokens)
            num_tokens = min(num_tokens, constraint.limit(state.request, window))
        return num_tokens

    def _plan_prefill(
        self, draft: PlanDraft, state: RequestState, lacking: int, share: int
    ) -> None:
        start = int(draft.starts[state.slot])
        take = self._limit(state, start, min(lacking, share, draft.left))
        if take > 0 and self._reserve_or_preempt(draft, state, start + take):
            draft.rows.append(PrefillRow(state, start, take, lacking))

    def _top_up(self, draft: PlanDraft) -> None:
        """What sharing left over goes to the rows that it cut, in order."""
        for row in draft.rows:
            left = draft.left
            if left <= 0:
                return
            if row.num_tokens < row.wanted:
                take = self._limit(row.state, row.start, min(row.wanted, row.num_tokens + left))
                if take > row.num_tokens and self._reserve(draft, [(row.state, row.start + take)]):
                    row.num_tokens = take

    def _issue(self, draft: PlanDraft) -> StepPlan | None:
        built = draft.build(self._steps + 1, self.table, self._releases)
        if built is None:
            return None
        plan, record = built
        self.outstanding.append(record)
        self._releases = []
        self._steps += 1
        self._stats.steps += 1
        if self.drafter is not None:
            decodes, drafts = len(draft.slots), int(draft.drafts.sum())
            self.drafter.planned(plan.step, decodes, drafts, decodes_only=not draft.rows)
        return plan

    # ---- memory ---------------------------------------------------------------------------------

    def _reserve(self, draft: PlanDraft, wants: Sequence[tuple[RequestState, int]]) -> bool:
        """Blocks for tokens [0, n) of each (request, n), all or nothing."""
        confirmed, covered = self.table.confirmed, self.table.covered
        grown = self.kv.reserve([(s, n, int(confirmed[s.slot])) for s, n in wants])
        if grown is None:
            return False
        draft.appends += grown
        for state, num_tokens in wants:
            covered[state.slot] = self.kv.covered(state, num_tokens)
        return True

    def _reserve_or_preempt(self, draft: PlanDraft, state: RequestState, num_tokens: int) -> bool:
        """Reserve, taking memory from the last in policy order; False if that was the request."""
        while not self._reserve(draft, [(state, num_tokens)]):
            if len(self.running) == 1:
                self._restart_alone(draft, state)
                return False
            victim = self.running[-1]
            draft.drop(victim)
            self._requeue(victim)
            if victim is state:
                return False
        return True

    def _requeue(self, state: RequestState) -> None:
        """Recompute later: blocks go back (their keys stay), the place in the queue is kept."""
        state.num_preemptions += 1
        self._stats.preemptions += 1
        self._vacate(state)
        self.queue.push(state)

    def _restart_alone(self, draft: PlanDraft, state: RequestState) -> None:
        """The only request that runs fits an empty pool but not this one: its blocks lie scattered
        over the frames of several page sizes. It begins again in an empty pool, alone."""
        draft.drop(state)
        self._requeue(state)
        self.kv.pool.reset()
        if state.alone:
            self.fail(
                state.request_id,
                "KV memory is too fragmented for this request even when "
                "it runs alone; raise kv.bytes",
            )
        state.alone = True

    # ---- admission ------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        alone = bool(self.running) and self.running[0].alone
        free = len(self.running) < self.max_running
        return self.pause is Pause.NONE and bool(self.waiting) and free and not alone

    def _admit(self, draft: PlanDraft, share: int, now: float) -> None:
        """Start waiting requests in order. Past one that does not fit up to `backfill` others
        are tried, until it has been overtaken for `max_bypass_age_s`."""
        skipped: list[RequestState] = []
        while len(skipped) < len(self.waiting) and self._may_admit() and draft.left > 0:
            state = self.waiting[len(skipped)]
            if self._start(draft, state, share, now):
                for other in skipped:
                    if other.bypassed_since_s is None:
                        other.bypassed_since_s = now
                continue
            skipped.append(state)
            since = state.bypassed_since_s
            overtaken = since is not None and now - since >= self.config.max_bypass_age_s
            if overtaken or state.alone or len(skipped) > self.config.backfill:
                return

    def _start(self, draft: PlanDraft, state: RequestState, share: int, now: float) -> bool:
        """Give a waiting request a slot, blocks and a first row; False if it does not fit now."""
        alone = not self.running
        if (state.alone and not alone) or state.blocked_at == self.kv.num_releases:
            return False
        num_known = len(state.tokens)
        hit = self.kv.take_hit(state)
        take = self._limit(state, hit, min(num_known - hit, share, draft.left))
        if take > 0 and not self.kv.fits_whole(state, num_known, hit + take, not alone):
            self.kv.give_back(state)
            if alone and hit and self.kv.pool.reset():
                # Its own hit lies so scattered that the rest does not fit beside it: drop it.
                return self._start(draft, state, share, now)
            state.blocked_at = self.kv.num_releases
            return False
        if take <= 0:
            self.kv.give_back(state)
            return False
        self._remove(state)
        self._seat(state, hit, now)
        reserved = self._reserve(draft, [(state, hit + take)])
        assert reserved, "fits_whole said that there is room"
        draft.rows.append(PrefillRow(state, hit, take, num_known - hit, is_new=True))
        return True

    def _seat(self, state: RequestState, hit: int, now: float) -> None:
        table, slot, stats = self.table, self._free_slots.pop(), self._stats
        self._epochs += 1
        table.epoch[slot] = self._epochs
        table.confirmed[slot], table.known[slot] = hit, len(state.tokens)
        table.last[slot] = max(state.prompt_len, state.max_len - 1)
        table.limit[slot], table.next_full[slot] = state.max_len, hit + self.kv.unit
        table.sampled[slot], table.scores[slot] = False, state.scores_only
        state.slot, state.status = slot, RequestStatus.RUNNING
        self._tenants[slot], self._order = state, None
        insort(self.running, state, key=BY_KEY)
        if self.drafter is not None:
            self.drafter.admit(slot, state.tokens, state.prompt_len)
        if state.num_cached is None:
            state.num_cached, state.queued_s = hit, now - state.request.arrival_s
            stats.prompt_tokens += state.prompt_len
            stats.cached_prompt_tokens += hit
            stats.prefix_queries += state.prompt_len if self.kv.caching else 0
            stats.prefix_hits += hit

    # ---- results --------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Committed]:
        """Apply the oldest step's result; returns the rows that still had their request.

        Rows of preempted, parked or ended requests are dropped, always: a resumed request samples
        them again under the same key, so nothing is lost and nothing comes twice.
        """
        record, table = self.outstanding.popleft(), self.table
        assert record.step == result.step, f"result of {result.step}, expected {record.step}"
        rows = np.flatnonzero(record.live(table))
        slots, counts, rejected = record.slots[rows], result.counts[rows], result.rejected[rows]
        table.confirmed[slots] += record.num_tokens[rows] - rejected
        table.known[slots] += counts
        kept = self._grade(slots, np.maximum(record.expected[rows] - 1, 0), rejected)
        committed = self._append(rows, slots, counts, result)
        if result.errors or result.prompt_logprobs or table.scores[slots].any():
            self._settle(committed, record, result)
        if self.kv.caching:
            for slot in slots[table.confirmed[slots] >= table.next_full[slots]].tolist():
                state = self._tenants[slot]
                if state is not None and state.error is None:
                    confirmed = int(table.confirmed[slot])
                    table.next_full[slot] = self.kv.cache_full(state, confirmed)
        for state, _, _ in committed:
            if state.finish_reason is not None:
                failed = state.error is not None
                self._end(
                    state,
                    RequestStatus.FAILED if failed else RequestStatus.FINISHED,
                    state.finish_reason,
                )
        if self.drafter is not None:
            self.drafter.finished(record.step, kept, idle=not (self.running or self.waiting))
        return committed

    def _grade(self, slots: Ints, drafts: Ints, rejected: NDArray[np.int32]) -> int:
        """Count what verification said; how many drafts were kept."""
        rows = np.flatnonzero(drafts)
        if not len(rows):
            return 0
        stats = self._stats
        kept = (drafts - rejected)[rows]
        stats.draft_rows += len(rows)
        stats.draft_tokens += int(drafts.sum())
        stats.accepted_tokens += int(kept.sum())
        by_position = stats.accepted_per_position
        by_position += [0] * (int(drafts.max()) - len(by_position))
        for slot, drafted, good in zip(slots[rows].tolist(), drafts[rows].tolist(), kept.tolist()):
            for position in range(good):
                by_position[position] += 1
            if self.drafter is not None:
                self.drafter.observe(slot, drafted, good)
        return int(kept.sum())

    def _append(
        self, rows: Ints, slots: Ints, counts: NDArray[np.int32], result: StepResult
    ) -> list[Committed]:
        """Append the sampled tokens to their requests, up to where each one ends."""
        committed: list[Committed] = []
        ids, errors, tenants = result.token_ids, result.errors, self._tenants
        plain = (counts == 1) & (self.table.known[slots] < self.table.limit[slots])
        if errors:
            plain &= ~np.isin(rows, list(errors))
        total = int(plain.sum())
        columns = (rows, slots, ids[rows, 0], plain)
        for row, slot, token, simple in zip(*(column.tolist() for column in columns)):
            state = tenants[slot]
            assert state is not None
            if simple and token not in state.stops:
                state.tokens.append(token)  # the common case: one token and no end in sight
                committed.append((state, row, [token]))
                continue
            tokens = [] if row in errors else ids[row, : result.counts[row]].tolist()
            tokens = tokens[: append_tokens(state, tokens)]
            total += len(tokens) - simple
            committed.append((state, row, tokens))
        self._stats.generation_tokens += total
        return committed

    def _settle(self, committed: list[Committed], record: StepRecord, result: StepResult) -> None:
        """Rows with an error, with prompt logprobs, or of requests that only score a prompt."""
        for state, row, _ in committed:
            if row in result.errors:
                state.error, state.finish_reason = result.errors[row], FinishReason.ERROR
                continue
            if row in result.prompt_logprobs:
                start = int(record.starts[row])
                collect_prompt_logprobs(state, start, result.prompt_logprobs[row])
            if state.scores_only and self.table.confirmed[state.slot] >= state.prompt_len:
                state.finish_reason = FinishReason.LENGTH

    def fail_step(self, error: str, rows: Sequence[int] | None, newest: bool = False) -> None:
        """A step has no result: fail the requests of `rows` (None: of all its rows).

        The step's other requests are recomputed. `newest`: it was the last one planned.
        """
        record = self.outstanding.pop() if newest else self.outstanding.popleft()
        if self.drafter is not None:
            self.drafter.forget_steps()
        slots = record.slots.tolist()
        for row in np.flatnonzero(record.live(self.table)).tolist():
            state = self._tenants[slots[row]]
            assert state is not None
            if rows is None or row in rows:
                self.fail(state.request_id, error)
            else:
                self._requeue(state)

    def forget_device(self) -> None:
        """The executor lost its slots: drop all tickets and recompute every running request."""
        self.outstanding.clear()
        if self.drafter is not None:
            self.drafter.forget_steps()
        for state in list(self.running):
            self._requeue(state)
        self._releases.clear()

    # ---- figures --------------------------------------------------------------------------------

    @property
    def fatal(self) -> EngineDead | None:
        """A part of planning failed for good, and the engine is to end with it."""
        return None if self.drafter is None else self.drafter.error

    def has_work(self) -> bool:
        """Whether `schedule` may find something to do, now or when a deadline comes."""
        if self.pause is Pause.ALL:
            return bool(self.parked)
        admissible = bool(self.waiting) and self.pause is Pause.NONE
        return bool(self.running or self.parked) or admissible

    @property
    def has_ended(self) -> bool:
        """Whether `drain_ended` has something to hand out."""
        return bool(self._ended)

    def stats(self) -> EngineStats:
        """A snapshot that the caller owns."""
        live = self._stats
        live.num_running, live.num_waiting = len(self.running), len(self.waiting)
        live.num_parked, live.kv_usage = len(self.parked), self.kv.pool.usage
        copy = EngineStats(**{name: getattr(live, name) for name in EngineStats.__slots__})
        copy.finished = dict(live.finished)
        copy.accepted_per_position = list(live.accepted_per_position)
        if self.drafter is not None:
            self.drafter.fill(copy)
        return copy
