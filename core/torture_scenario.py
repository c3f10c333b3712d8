"""What a torture run plays: a seed makes a tiny machine and the events that happen to it.

Also what each request must answer, by the fake model and the stop rules alone. Nothing here looks
at the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cardcage.core.scheduler_config import SchedulerConfig
from cardcage.core.torture_device import EOS, VOCAB, fake_stream
from cardcage.core.types import (
    FinishReason,
    KVCapacity,
    KVGroupSpec,
    Request,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at virtual second `at_s`. Events without a live target do nothing."""

    at_s: float
    what: str  # arrive, abort, pause, resume, reset, park, wake, fault
    target: str = ""
    request: Request | None = None
    option: str = ""
    until_s: float = 0.0

    def __str__(self) -> str:
        more = ""
        if self.request is not None:
            p = self.request.params
            more = (
                f" prompt={len(self.request.prompt_token_ids)} max_tokens={p.max_tokens} "
                f"priority={self.request.priority}"
            )
        until = f" until {self.until_s:.4f}" if self.until_s else ""
        return f"{self.at_s:.4f}s {self.what} {self.target}{self.option}{more}{until}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine and what happens to it. `drafts`: most drafts per row, 0 for none; `host_drafts`:
    a speculator on the host makes them, not the device."""

    seed: int
    config: SchedulerConfig
    capacity: KVCapacity
    max_in_flight: int
    drafts: int
    constrained: bool
    events: tuple[Event, ...]
    host_drafts: bool = False


def make_scenario(seed: int, num_requests: int, faults: bool = True) -> Scenario:
    """A scenario from a seed. Machines are small, so that memory ends every few steps."""
    rng = Random(seed)
    max_len = rng.choice([16, 24, 48, 96])
    groups = _make_groups(rng, max_len)
    budget = rng.choice([3, 8, 16, 24, 40])
    steps = rng.choice([1, 2, 2, 3])
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=rng.choice([1, 2, 4, 6, 8, 10]),
        max_model_len=max_len,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        prefix_caching=rng.random() < 0.85,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        max_num_queued_reqs=rng.choice([0, 0, 0, 0, 20]),
        max_num_queued_tokens=rng.choice([0, 0, 0, 0, 500]),
        watermark=rng.choice([0.0, 0.0, 0.1]),
        backfill=rng.choice([0, 2, 8]),
        max_bypass_age_s=rng.choice([0.0, 0.01, 0.1]),
        steps_in_flight=steps,
        root_seed=b"torture",
    )
    per_request = sum(-(-max_len // g.block_size) * g.page_bytes for g in groups)
    pool = int(per_request * rng.choice([0.6, 0.8, 1.0, 1.5, 3.0])) + 3 * max(
        g.page_bytes for g in groups
    )
    if len({g.page_bytes for g in groups}) > 1:
        pool += 1200  # a few frames, or nothing fits at all
    capacity = KVCapacity(groups, pool, rng.randint(2, 12), max_len)
    events = _make_events(rng, num_requests, max_len, faults)
    return Scenario(
        seed,
        config,
        capacity,
        rng.randint(1, steps),
        rng.choice([0, 0, 0, 1, 3]),
        rng.random() < 0.15,
        tuple(events),
        rng.random() < 0.5,
    )


def _make_groups(rng: Random, max_len: int) -> tuple[KVGroupSpec, ...]:
    window = {"window": rng.choice([1, 3, 8, max_len // 2])}
    full = KVGroupSpec("full", "full", 4, 64)
    return rng.choice(
        [
            (full,),
            (KVGroupSpec("full", "full", rng.choice([1, 3, 16]), 64),),
            (KVGroupSpec("window", "window", 4, 64, window),),
            (full, KVGroupSpec("window", "window", 4, 64, window)),
            (full, KVGroupSpec("window", "window", 4, 192, window)),
            (
                full,
                KVGroupSpec("window", "window", 2, 96, window),
                KVGroupSpec("f2", "full", 8, 128),
            ),
            (KVGroupSpec("full", "full", 4, 40), KVGroupSpec("window", "window", 4, 56, window)),
        ]
    )


def _make_events(rng: Random, num_requests: int, max_len: int, faults: bool) -> list[Event]:
    texts = [[rng.randrange(VOCAB) for _ in range(rng.choice([4, 8, 16]))] for _ in range(3)]
    events: list[Event] = []
    now, pace = 0.0, rng.choice([0.0003, 0.001, 0.003, 0.01])
    for index in range(num_requests):
        now += rng.expovariate(1 / pace) if rng.random() < 0.8 else 0.0
        request = _make_request(rng, f"r{index}", now, texts, max_len)
        name = request.request_id
        events.append(Event(now, "arrive", name, request))
        later = now + rng.uniform(0.0, 20 * pace)
        chance = rng.random()
        if chance < 0.10:
            events.append(Event(later, "abort", name))
        elif chance < 0.18:
            until = later + rng.uniform(0.0, 0.2)
            events.append(Event(later, "park", name, None, rng.choice(["fail", "wake"]), until))
            events.append(Event(later + rng.uniform(0.0, 0.1), "wake", name))
        elif chance < 0.21:
            events.append(Event(later, "pause", "", None, rng.choice(["all", "new"])))
            events.append(Event(later + rng.uniform(0.0, 0.05), "resume"))
        elif chance < 0.23:
            events.append(Event(later, "reset"))
        elif faults and chance < 0.27:
            mode = rng.choice(["row", "rows", "step", "crash", "submit"])
            events.append(Event(later, "fault", "", None, mode))
    events.append(Event(now + 1.0, "resume"))
    events.sort(key=lambda event: event.at_s)
    return events


def _make_request(
    rng: Random, name: str, now: float, texts: Sequence[Sequence[int]], max_len: int
) -> Request:
    """Prompts are common texts in any order, so that equal blocks follow other prefixes."""
    length = min(rng.randint(1, max_len), rng.randint(1, max_len))
    prompt: list[int] = []
    while len(prompt) < length and rng.random() < 0.9:
        prompt += rng.choice(texts)
    del prompt[length:]
    prompt += [rng.randrange(VOCAB) for _ in range(length - len(prompt))]
    max_tokens: int | None = rng.choice([1, 2, 4, 8, 16, 32, 48])
    if rng.random() < 0.08:
        max_tokens = rng.choice([0, None])
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if max_tokens and rng.random() < 0.1 else 0,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        logprobs=1 if rng.random() < 0.1 else None,
        prompt_logprobs=1 if rng.random() < 0.1 else None,
    )
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        eos_token_ids=(EOS,),
        arrival_s=now,
        priority=rng.randint(0, 2),
        seed=rng.choice([0, 0, 1]),  # equal prompts, other tokens: outputs do not share
        root_key=rng.choice([b"", b"", b"tenant"]),
    )


def expected_answer(
    request: Request, max_model_len: int, max_fit_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """What a request must get, by the fake model and the stop rules alone."""
    params, prompt = request.params, request.prompt_token_ids
    limit = max_model_len - len(prompt)
    limit = min(
        limit, max_fit_len - len(prompt) if params.max_tokens is None else params.max_tokens
    )
    draw = fake_stream(prompt, request.seed)
    answer: list[int] = []
    while len(answer) < limit:
        token = draw()
        answer.append(token)
        if len(answer) < params.min_tokens:
            continue
        if token == EOS and not params.ignore_eos:
            return answer, FinishReason.STOP, None
        if token in params.stop_token_ids:
            return answer, FinishReason.STOP, token
    return answer, FinishReason.LENGTH, None
