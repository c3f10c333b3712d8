"""`cardcage torture`: the real scheduler and engine under a virtual clock and a fake device.

A seed makes a scenario: a tiny machine (pool, groups, budgets) and events (arrivals, aborts,
pauses, parkings, device faults, slow steps). `play` runs it and checks every invariant after every
step; the same seed gives the same trace. A failure is shrunk to few events. Planted faults
(`torture_faults`) prove that the checks find what they should.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from random import Random

from cardcage.core.contracts import DraftAsk, KVKind
from cardcage.core.draft_policy import DraftPolicy
from cardcage.core.drafting import Drafter
from cardcage.core.engine import Engine
from cardcage.core.errors import RequestError
from cardcage.core.scheduler import Scheduler
from cardcage.core.torture_device import (
    VOCAB,
    FakeDevice,
    TortureFailure,
    VirtualClock,
    guess_token,
    mix,
    token_logprob,
)
from cardcage.core.torture_faults import FAULTS, plant
from cardcage.core.torture_scenario import Event, Scenario, expected_answer, make_scenario
from cardcage.core.types import (
    FinishReason,
    KVGroupSpec,
    Request,
    StepPlan,
    TokenLogprob,
    TokenOutput,
)

KindFactory = Callable[[KVGroupSpec], KVKind]


@dataclass(slots=True)
class TortureReport:
    """What a run did. `failure` is None, or the broken invariant with its trace's end and the
    events it was shrunk to."""

    seed: int
    trace_digest: str = ""
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    drafts: int = 0  # made on the host
    endings: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    tail: list[str] = field(default_factory=list)
    minimal: tuple[Event, ...] = ()


# ---- playing it ---------------------------------------------------------------------------------


class _SomeTokens:
    """A constraint that shortens rows in a way that depends on the position alone."""

    def limit(self, request: Request, window: range) -> int:
        return min(len(window), 1 + mix(window.start, len(request.prompt_token_ids)) % 7)


class _Guesser:
    """A speculator that is often right, as the device's own is, and careless about its answers."""

    def __init__(self, seed_of: Callable[[int], int]) -> None:
        self._seed_of = seed_of
        self._slots: dict[int, Sequence[int]] = {}

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        if slot in self._slots:
            raise TortureFailure(f"drafts: slot {slot} is admitted twice")
        self._slots[slot] = token_ids

    def on_release(self, slot: int, token_ids: Sequence[int]) -> None:
        if self._slots.pop(slot, None) is not token_ids:
            raise TortureFailure(f"drafts: slot {slot} is released with other tokens")

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: DraftAsk) -> list[int]:
        if self._slots[ask.slot] is not ask.token_ids:
            raise TortureFailure(f"drafts: slot {ask.slot} is asked about with other tokens")
        state, drafts = 0, []
        for token in ask.token_ids:
            state = mix(state, token)
        for _ in range(mix(state, 3) % (ask.max_drafts + 2)):
            drafts.append(guess_token(state, self._seed_of(ask.slot)))
            state = mix(state, drafts[-1])
        return [*drafts, -1] if mix(state, 5) % 4 == 0 else drafts


class World:
    """One play of a scenario, with every check. Raises TortureFailure."""

    def __init__(
        self, scenario: Scenario, kinds: KindFactory, fault: str | None, check_every: int = 1
    ) -> None:
        self.scenario, self.check_every = scenario, check_every
        self.clock = VirtualClock()
        self.device = FakeDevice(
            scenario.capacity,
            self.clock,
            Random(scenario.seed),
            scenario.max_in_flight,
            self.check_plan,
        )
        drafts, host = scenario.drafts, scenario.host_drafts
        self.scheduler = Scheduler(
            scenario.config,
            scenario.capacity,
            [kinds(g) for g in scenario.capacity.groups],
            self.clock,
            (_SomeTokens(),) if scenario.constrained else (),
            (lambda request: mix(request.seed, len(request.request_id)) % (drafts + 1))
            if drafts and not host
            else None,
            self._drafter(drafts) if drafts and host else None,
        )
        self.engine = Engine(self.scheduler, self.device, self.clock)
        self.requests: dict[str, Request] = {}
        self.order: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.live: set[str] = set()
        self.aborted: set[str] = set()
        self.admitted: list[str] = []
        self.bypassed_s: dict[str, float] = {}
        self.report = TortureReport(scenario.seed)
        self.trace: list[str] = []
        self._hash = sha256()
        if fault is not None:
            plant(fault, self.engine)

    def _drafter(self, most: int) -> Drafter:
        def seed_of(slot: int) -> int:
            return next(s.request.seed for s in self.scheduler.running if s.slot == slot)

        policy = DraftPolicy(most, adaptive=self.scenario.seed % 3 > 0)
        return Drafter(_Guesser(seed_of), "torture", policy, VOCAB, True, self.clock)

    def note(self, line: str) -> None:
        """One line of the trace; the digest covers all lines."""
        self._hash.update(line.encode())
        self.trace.append(line)
        del self.trace[:-40]

    def play(self) -> TortureReport:
        """Run to the end; the report's `failure` says what broke, if anything."""
        try:
            self._play()
        except TortureFailure as broken:
            self.report.failure = str(broken)
        except Exception as error:
            self.report.failure = f"raised: {type(error).__name__}: {error}"
        report, stats = self.report, self.scheduler.stats()
        report.trace_digest, report.tail = self._hash.hexdigest(), list(self.trace)
        report.requests, report.steps = len(self.outputs), stats.steps
        report.tokens, report.preemptions = stats.generation_tokens, stats.preemptions
        report.cached_tokens = stats.prefix_hits
        return report

    def _play(self) -> None:
        events = list(self.scenario.events)
        work = sum(len(e.request.prompt_token_ids) + 16 for e in events if e.request is not None)
        patience, index, quiet = 500 + 60 * work, 0, 0
        while True:
            while index < len(events) and events[index].at_s <= self.clock.now:
                self._apply(events[index])
                index += 1
            moved = False
            if self.engine.has_work():
                patience -= 1
                moved = self._step()
            ahead = [events[index].at_s] if index < len(events) else []
            if self.device.in_flight:
                ahead.append(self.device.in_flight[0].ready_s)
            deadline = self.scheduler.next_deadline_s()
            ahead += [deadline] if deadline is not None else []
            ahead = [at for at in ahead if at > self.clock.now]
            if moved:
                self.clock.now += 0.0002
                quiet = 0
            elif ahead:
                self.clock.now = min(ahead)
            elif self.engine.has_work():
                quiet += 1
            else:
                break
            if patience < 0 or quiet > 5:
                raise TortureFailure(f"stuck: {sorted(self.live)[:8]} wait and nothing happens")
        self._check_end()

    def _apply(self, event: Event) -> None:
        self.note(str(event))
        name = event.target
        if event.request is not None:
            self._arrive(event.request)
        elif event.what == "abort":
            self.aborted |= {name} & self.live
            self.engine.abort([name, "nobody"])
        elif event.what == "pause":
            self.engine.pause(all=event.option == "all")
        elif event.what == "resume":
            self.engine.resume()
        elif event.what == "reset":
            self.engine.reset_prefix_cache()
        elif event.what == "park":
            self.scheduler.park(name, "torture", event.until_s, event.option)
            self.bypassed_s.pop(name, None)
        elif event.what == "wake":
            self.scheduler.wake(name)
        else:
            self.device.armed.append(event.option)

    def _arrive(self, request: Request) -> None:
        name = request.request_id
        rank = request.priority if self.scenario.config.policy == "priority" else 0
        try:
            self.engine.add_request(request)
        except RequestError as refused:
            self.note(f"refused {name}: {type(refused).__name__}")
            self.report.endings[type(refused).__name__] += 1
            return
        self.requests[name], self.outputs[name] = request, []
        self.order[name] = (rank, len(self.order))
        self.live.add(name)

    def _step(self) -> bool:
        """One engine step and all checks; whether anything moved."""
        waiting = {s.request_id for s in self.scheduler.waiting}
        self.admitted.clear()
        before = self.device.num_moves
        outputs = self.engine.step(block=False)
        for output in outputs:
            self._take(output)
        if self.aborted:
            raise TortureFailure(f"abort: {sorted(self.aborted)} did not end at the next step")
        self._check_order(waiting)
        if self.device.num_moves % self.check_every == 0:
            self.check_memory()
        return bool(outputs) or self.device.num_moves != before

    # ---- checks ---------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        """Called by the device when a plan arrives, right after it was made."""
        config, scheduler = self.scenario.config, self.scheduler
        self.note(
            f"plan {plan.step} slots={plan.slots.tolist()} starts={plan.starts.tolist()} "
            f"tokens={plan.num_tokens.tolist()} drafts={plan.num_drafts.tolist()} "
            f"admits={[(a.request_id, a.num_computed) for a in plan.admits]} "
            f"releases={plan.releases} appends={plan.block_appends} guesses={plan.drafts}"
        )
        self.admitted += [a.request_id for a in plan.admits]
        if plan.total_tokens > config.max_num_batched_tokens:
            raise TortureFailure(
                f"budget: {plan.total_tokens} tokens in a step of at most "
                f"{config.max_num_batched_tokens}"
            )
        if len(scheduler.running) > min(config.max_num_seqs, self.scenario.capacity.max_slots):
            raise TortureFailure("budget: more requests run than allowed")
        single = (plan.num_tokens - plan.num_drafts == 1).tolist()
        if sorted(single, reverse=True) != single or len(set(plan.slots.tolist())) != len(single):
            raise TortureFailure("plan: decode rows are not first, or a slot has two rows")
        if plan.drafts and len(scheduler.outstanding) > 1:
            raise TortureFailure("drafts: planned beside a step that is still on its way")
        self.report.drafts += sum(map(len, plan.drafts.values()))
        grown = {slot for _, slot, _, _ in plan.block_appends} | {a.slot for a in plan.admits}
        for state in scheduler.running:
            if state.slot in grown:
                confirmed = int(scheduler.table.confirmed[state.slot])
                for kind, gone, ids in zip(scheduler.kv.kinds, state.num_released, state.block_ids):
                    if gone != min(kind.first_live_block(confirmed), len(ids)):
                        raise TortureFailure(
                            f"window: {state.request_id} holds blocks that no "
                            "row can read, or gave back some that rows read"
                        )

    def check_memory(self) -> None:
        """Every block is held by exactly those who think so; places are exclusive."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        held: Counter[tuple[int, int]] = Counter()
        for state in scheduler.states.values():
            if (state.slot >= 0) != (state in scheduler.running):
                raise TortureFailure(f"slot: {state.request_id} has slot {state.slot}")
            for group, ids in enumerate(state.block_ids):
                held.update((group, block) for block in ids if block)
        for (group, block), count in held.items():
            if pool.ref_count(group, block) != count:
                raise TortureFailure(
                    f"blocks: {count} requests hold block {block} of group "
                    f"{group}, its count is {pool.ref_count(group, block)}"
                )
        used = sum(pool.groups[group].page_bytes for group, _ in held)
        if used != pool.total_bytes - pool.free_bytes:
            raise TortureFailure("blocks: leaked, blocks are in use that no request holds")
        slots = [s.slot for s in scheduler.running]
        if len(set(slots)) != len(slots):
            raise TortureFailure("slot: two requests share a slot")
        try:
            pool.check()
        except AssertionError as broken:
            raise TortureFailure(f"pool: {broken}") from broken

    def _check_order(self, waiting: set[str]) -> None:
        """Who is overtaken for longer than max_bypass_age_s is not overtaken again."""
        now, limit = self.clock.now, self.scenario.config.max_bypass_age_s
        for name in self.admitted:
            self.bypassed_s.pop(name, None)
        last = max((self.order[name] for name in self.admitted), default=None)
        for state in self.scheduler.waiting:
            name = state.request_id
            if last is None or name not in waiting or name in self.admitted:
                continue
            if self.order[name] < last:
                since = self.bypassed_s.setdefault(name, now)
                if now - since > limit:
                    raise TortureFailure(f"order: {name} is overtaken since {since:.4f}")

    def _take(self, output: TokenOutput) -> None:
        name = output.request_id
        self.note(f"out {name} {output.token_ids} {output.finish_reason} {output.stop_reason}")
        if name not in self.live:
            raise TortureFailure(f"terminal: an output for {name} after its end")
        self.outputs[name].append(output)
        if output.finish_reason is None:
            return
        self.live.discard(name)
        self.aborted.discard(name)
        self.report.endings[output.finish_reason.value] += 1
        self._check_stream(self.requests[name], self.outputs[name])

    def _check_stream(self, request: Request, outputs: list[TokenOutput]) -> None:
        """A request got exactly the tokens that the fake model says, and the right ending."""
        name, last = request.request_id, outputs[-1]
        got = [token for output in outputs for token in output.token_ids]
        want, reason, stop = expected_answer(
            request, self.scheduler.max_model_len, self.scheduler.kv.max_fit_len
        )
        if last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if (got, last.finish_reason, last.stop_reason) != (want, reason, stop):
                raise TortureFailure(
                    f"stream: {name} got {got} {last.finish_reason}, expected {want} {reason}"
                )
        elif got != want[: len(got)]:
            raise TortureFailure(f"stream: {name} got {got}, expected {want}")
        if last.finish_reason is FinishReason.ERROR and name not in self.device.blamed:
            parked = last.error is not None and last.error.startswith("torture: not done")
            if not parked:
                raise TortureFailure(f"error: {name} failed without cause: {last.error}")
        self._check_logprobs(request, outputs, got)

    def _check_logprobs(self, request: Request, outputs: list[TokenOutput], got: list[int]) -> None:
        if request.params.logprobs is not None:
            found = [entry for output in outputs for entry in output.logprobs or []]
            text = [*request.prompt_token_ids, *got]
            if found != _logprobs(text, len(text) - len(got)):
                raise TortureFailure(f"logprobs: {request.request_id} are not those of its tokens")
        if request.params.prompt_logprobs is not None:
            lists = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
            ended = outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            prompt = list(request.prompt_token_ids)
            if len(lists) > 1 or (ended and lists != [[None, *_logprobs(prompt, 1)]]):
                raise TortureFailure(f"logprobs: the prompt of {request.request_id}")

    def _check_end(self) -> None:
        if self.live:
            raise TortureFailure(f"lost: {sorted(self.live)[:8]} never ended")
        pool = self.scheduler.kv.pool
        if not pool.reset() or pool.num_cached:
            raise TortureFailure("blocks: leaked, some are in use when nothing runs")
        if self.scheduler.stats().finished.keys() - {r.value for r in FinishReason}:
            raise TortureFailure("stats: unknown finish reason")


def _logprobs(tokens: Sequence[int], first: int) -> list[TokenLogprob]:
    state, out = 0, []
    for index, token in enumerate(tokens):
        if index >= first:
            out.append(token_logprob(state, token))
        state = mix(state, token)
    return out


# ---- running and shrinking ----------------------------------------------------------------------


@lru_cache(maxsize=1)
def plugin_kinds() -> KindFactory:
    """Cache kinds through the door that everyone uses: the `kv_kinds` entry points."""
    from cardcage.core.config import load_config
    from cardcage.core.contracts import KVKindNeed
    from cardcage.core.host import Host

    host = Host(load_config(overrides={}))

    def make(group: KVGroupSpec) -> KVKind:
        kind: KVKind = host.resolve("kv_kinds", KVKindNeed(), use=group.kind, group=group)
        return kind

    return make


def run_torture(
    seed: int,
    *,
    requests: int = 40,
    faults: bool = True,
    fault: str | None = None,
    kinds: KindFactory | None = None,
    shrink: bool = True,
    check_every: int = 1,
) -> TortureReport:
    """Play the scenario of a seed.

    Args:
        seed: the same seed and `requests` give the same trace.
        requests: how many arrive.
        faults: let the device fail now and then.
        fault: plant this fault of `torture_faults.FAULTS` in the engine.
        kinds: makes the rules of a KV group; None takes the plugins.
        shrink: on failure, remove events as long as it fails the same way.
        check_every: walk over all memory once in so many moves; other checks always run.
    """
    kinds = kinds or plugin_kinds()
    scenario = make_scenario(seed, requests, faults)
    report = World(scenario, kinds, fault, check_every).play()
    if report.failure is None or not shrink:
        return report
    return shrink_failure(scenario, report, kinds, fault)


def shrink_failure(
    scenario: Scenario,
    report: TortureReport,
    kinds: KindFactory,
    fault: str | None,
    max_plays: int = 600,
) -> TortureReport:
    """Greedy removal: chunks of events, halving, as long as the same invariant breaks."""
    assert report.failure is not None
    what = report.failure.split(":")[0]
    events, chunk, plays = list(scenario.events), max(1, len(scenario.events) // 2), 0
    while chunk and plays < max_plays:
        at, removed = 0, False
        while at < len(events) and plays < max_plays:
            fewer = events[:at] + events[at + chunk :]
            plays += 1
            found = World(replace(scenario, events=tuple(fewer)), kinds, fault).play()
            if found.failure is not None and found.failure.split(":")[0] == what:
                events, report, removed = fewer, found, True
            else:
                at += chunk
        chunk = chunk if removed and chunk == 1 else chunk // 2
    report.minimal = tuple(events)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """`cardcage torture`: play seeds, print what they did, return 1 if an invariant broke."""
    parser = argparse.ArgumentParser(prog="cardcage torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--requests", type=int, default=40, help="requests per seed")
    parser.add_argument("--plant", choices=sorted(FAULTS), help="break the engine on purpose")
    args = parser.parse_args(argv)
    totals, began = Counter[str](), time.perf_counter()
    for seed in range(args.seed, args.seed + args.seeds):
        report = run_torture(seed, requests=args.requests, fault=args.plant)
        totals.update(
            requests=report.requests,
            steps=report.steps,
            tokens=report.tokens,
            preemptions=report.preemptions,
            cached_tokens=report.cached_tokens,
            drafts=report.drafts,
        )
        if args.seeds == 1 or report.failure:
            print(
                f"seed {seed}: {report.steps} steps, trace {report.trace_digest[:16]}, "
                f"endings {dict(sorted(report.endings.items()))}"
            )
        if report.failure:
            print(f"FAILED {report.failure}\nevents it needs ({len(report.minimal)}):")
            print("\n".join(f"  {event}" for event in report.minimal))
            print("last steps:\n" + "\n".join(f"  {line}" for line in report.tail[-12:]))
            return 1
    took = time.perf_counter() - began
    print(f"{args.seeds} seeds held: {dict(totals)} in {took:.1f} s")
    return 0
