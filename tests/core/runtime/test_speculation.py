"""The whole of speculation on a small model: cards, scheduler, runner; and its distribution.

The model computes each row by itself, so with drafts and without the logits are the same bits
and every text must be equal, greedy or drawn.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import DraftAsk
from cardcage.core.draft_policy import DraftPolicy
from cardcage.core.drafting import Drafter
from cardcage.core.engine import Engine
from cardcage.core.runtime import sampler as sampler_module
from cardcage.core.runtime.batch import BatchState
from cardcage.core.runtime.kv_pool import KVPool
from cardcage.core.runtime.model_runner import ModelRunner, StepHandle, Verified
from cardcage.core.runtime.sampler import Sampler
from cardcage.core.scheduler import Scheduler, SchedulerConfig
from cardcage.core.types import KVCapacity, Request, SamplingParams, StepPlan, StepResult
from cardcage.plugins.speculators.ngram.lookup import NgramLookup
from cardcage.plugins.speculators.suffix import SuffixOptions
from cardcage.plugins.speculators.suffix.decoding import SuffixDecoding
from tests.support.core_rig import kind_of
from tests.support.fake_model import Driver, FakeModel, Live

CPU = torch.device("cpu")


class Ticket:
    def __init__(self, handle: StepHandle) -> None:
        self.handle = handle

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.handle.result()


class RunnerExecutor:
    """A model runner as an executor, without weights to load."""

    max_in_flight = 2

    def __init__(self, model: FakeModel, pages: int, slots: int) -> None:
        groups = model.kv_groups()
        pool = KVPool(groups, pages * groups[0].page_bytes, CPU)
        pool.buffer[groups[0].page_bytes :].fill_(255)  # NaN where nothing was written
        batch = BatchState(slots, 64, model.vocab, groups, CPU)
        self.runner = ModelRunner(model, pool, batch, Sampler(batch))
        self.capacity = KVCapacity(groups, pool.num_bytes, slots, 64)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return Ticket(self.runner.step(plan))

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None: ...


class Seer:
    """Knows the texts that will come, and errs now and then; sometimes with ids that are none."""

    def __init__(self, texts: Sequence[Sequence[int]], chance: float) -> None:
        self.texts, self.chance = [list(t) for t in texts], chance
        self.rng = Random(5)

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None: ...
    def on_release(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        return [self._propose(list(ask.token_ids), ask.max_drafts) for ask in asks]

    def _propose(self, tokens: list[int], most: int) -> list[int]:
        text = next((t for t in self.texts if t[: len(tokens)] == tokens), [])
        right = text[len(tokens) : len(tokens) + most]
        return [t if self.rng.random() < self.chance else self.rng.randrange(47) for t in right]


PROMPTS = [[5, 3, 7, 9, 1, 2, 30, 40, 22, 11], [5, 3, 7, 9, 1, 2, 30, 40, 8], [4] * 7, [1, 2] * 6]
Make = Callable[[list[list[int]]], Any]
CARDS: dict[str, Make] = {
    "ngram": lambda texts: NgramLookup(1, 3),
    "suffix": lambda texts: SuffixDecoding(SuffixOptions()),
    "seer": lambda texts: Seer(texts, 0.7),
    "perfect": lambda texts: Seer(texts, 1.0),
    "wrong": lambda texts: Seer(texts, 0.0),
}


def serve(
    params: Sequence[SamplingParams],
    card: Any = None,
    *,
    k: int = 4,
    pages: int = 400,
    adaptive: bool = False,
    eos: tuple[int, ...] = (),
    **numbers: Any,
) -> tuple[list[list[int]], list[Any], Engine]:
    """The texts (prompts included) and log-probabilities of all prompts, served together."""
    numbers.setdefault("max_num_batched_tokens", 24)
    executor = RunnerExecutor(FakeModel(), pages, 6)
    config = SchedulerConfig(max_num_seqs=4, max_model_len=64, **numbers)
    drafter = None
    if card is not None:
        policy = DraftPolicy(k, adaptive)
        drafter = Drafter(
            card, "card", policy, executor.runner.batch.vocab_size, True, time.monotonic
        )
    kinds = [kind_of(group) for group in executor.capacity.groups]
    scheduler = Scheduler(config, executor.capacity, kinds, time.monotonic, drafter=drafter)
    engine = Engine(scheduler, executor, time.monotonic)  # type: ignore[arg-type]
    texts = [list(prompt) for prompt in PROMPTS]
    logprobs: list[Any] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        own = params[index % len(params)]
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, params=own,
                                   seed=index, eos_token_ids=eos))  # fmt: skip
    for _ in range(2000):
        if not engine.has_work():
            break
        for output in engine.step():
            assert output.error is None
            texts[int(output.request_id)] += output.token_ids
            for entry in output.logprobs or []:
                logprobs[int(output.request_id)].append((entry.token_id, entry.logprob, entry.top))
    assert not engine.has_work()
    return texts, logprobs, engine


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
FEATURES: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY],
    "drawn": [DRAWN],
    "truncated": [DRAWN.with_(top_k=9, top_p=0.9, min_p=0.02)],
    "penalties": [
        GREEDY.with_(repetition_penalty=1.3),
        DRAWN.with_(frequency_penalty=0.7, presence_penalty=0.5),
    ],
    "lists": [
        DRAWN.with_(bad_words_ids=((7,), (11, 8), (4, 4, 4)), logit_bias={3: 4.0, 9: -3.0}),
        DRAWN.with_(allowed_token_ids=tuple(range(0, 48, 3))),
    ],
    "ends": [
        GREEDY.with_(stop_token_ids=(3, 14, 15, 20), min_tokens=9, ignore_eos=False),
        DRAWN.with_(min_tokens=4, ignore_eos=False),
        GREEDY.with_(max_tokens=3),
    ],
    "logprobs": [GREEDY.with_(logprobs=3), DRAWN.with_(logprobs=0, prompt_logprobs=2)],
    "mixed": [GREEDY, DRAWN.with_(top_k=5), DRAWN.with_(frequency_penalty=1.0, logprobs=1)],
}
MACHINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tiny pool": {"pages": 26},
    "chunks": {"max_num_batched_tokens": 7},
    "one step in flight": {"steps_in_flight": 1},
    "no cache": {"prefix_caching": False},
}


ALWAYS = [
    *itertools.product(["seer"], FEATURES),
    *itertools.product(["ngram", "suffix"], ["ends", "mixed"]),
    *itertools.product(["perfect", "wrong"], ["mixed"]),
]
CELLS = [
    pytest.param(*cell, marks=[] if cell in ALWAYS else [pytest.mark.slow])
    for cell in itertools.product(CARDS, FEATURES)
]


@pytest.mark.parametrize(("card", "feature"), CELLS)
def test_no_draft_changes_a_text(card: str, feature: str) -> None:
    params, eos = FEATURES[feature], (2, 6, 12, 21)
    texts, logprobs, _ = serve(params, eos=eos)
    found, found_logprobs, engine = serve(params, CARDS[card](texts), eos=eos)
    assert found == texts
    assert found_logprobs == logprobs
    stats = engine.stats()
    outputs = sum(len(text) for text in texts) - sum(len(prompt) for prompt in PROMPTS)
    assert stats.generation_tokens == outputs
    if card == "perfect":
        assert stats.draft_tokens == stats.accepted_tokens > 20
    if card == "wrong":
        assert stats.accepted_tokens < stats.draft_tokens / 5


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "card",
    ["seer", pytest.param("ngram", marks=pytest.mark.slow),
     pytest.param("suffix", marks=pytest.mark.slow)],
)  # fmt: skip
def test_no_machine_changes_a_text(card: str, machine: str) -> None:
    params = FEATURES["mixed"]
    texts, logprobs, _ = serve(params)
    found, found_logprobs, engine = serve(params, CARDS[card](texts), **MACHINES[machine])
    assert found == texts
    assert found_logprobs == logprobs
    stats = engine.stats()
    assert stats.draft_tokens > 0
    assert (stats.preemptions > 0) == (machine == "tiny pool")


@pytest.mark.parametrize("k", [1, 30])
@pytest.mark.parametrize("adaptive", [False, True])
def test_any_number_of_drafts(k: int, adaptive: bool) -> None:
    params = FEATURES["mixed"]
    texts, _, _ = serve(params)
    found, _, engine = serve(params, Seer(texts, 0.8), k=k, adaptive=adaptive)
    assert found == texts
    plans = engine.executor.plans  # type: ignore[attr-defined]
    assert max(int(p.num_drafts.max()) for p in plans) <= k


def test_kv_after_rejections_is_that_of_the_text() -> None:
    """Every cell that a later row reads was written for the token that is there."""
    texts, _, _ = serve([GREEDY])
    _, _, engine = serve([GREEDY], Seer(texts, 0.5))
    follow = [*texts[0], 7]  # a prefix hit on blocks that drafts were written into
    request = Request(request_id="x", prompt_token_ids=follow, params=GREEDY.with_(max_tokens=4))
    engine.add_request(request)
    got: list[int] = []
    while engine.has_work():
        for output in engine.step():
            got += output.token_ids
            assert output.num_cached_tokens >= 28
    assert got == FakeModel().greedy(follow, 4)


# ---- the distribution ---------------------------------------------------------------------------

VOCAB, STATES = 6, 3


class Bigram(FakeModel):
    """The next token depends on the last one alone, so that exact products are known."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB, windows=(0,))
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.3

    def forward(self, inp: Any) -> torch.Tensor:
        return torch.nn.functional.one_hot(inp.input_ids, VOCAB).to(torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._mul(hidden, self.table)


def chance(model: Bigram, params: SamplingParams) -> np.ndarray:
    """p[a, b]: token b after a."""
    z = model.table.double() / params.temperature
    if params.top_k:
        least = z.topk(params.top_k, dim=1).values[:, -1:]
        z = z.masked_fill(z < least, -math.inf)
    return torch.softmax(z, 1).numpy()


class DenseSampler(Sampler):
    """Samples all rows at once, as on accelerators, whatever the device."""

    def _by_row(self, plan: Any, logits: torch.Tensor) -> bool:
        return False


def triples(
    params: SamplingParams, num_drafts: int, rounds: int, slots: int = 500, dense: bool = True
) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens after token 0, each drawn with its own seed."""
    make = DenseSampler if dense else Sampler
    model, counts = Bigram(), np.zeros((VOCAB,) * STATES, np.int64)
    guess = model.table.argmax(1).tolist()
    for turn in range(rounds):
        batch = BatchState(slots, 16, VOCAB, model.kv_groups(), CPU)
        pool = KVPool(model.kv_groups(), 64 * model.kv_groups()[0].page_bytes, CPU)
        runner, driver = ModelRunner(model, pool, batch, make(batch)), Driver(1)
        made = [driver.admit(s, [0], params=params, seed=turn * slots + s) for s in range(slots)]
        lives: list[Live] = [live for live, _ in made]
        for live in lives:
            live.blocks = ([0] * 16,)  # no attention: nothing is cached
        plan = driver.plan([(live, 1, True) for live in lives], [admit for _, admit in made])
        texts = [row[:1].tolist() for row in runner.step(plan).result().token_ids]
        while open_ := [i for i, text in enumerate(texts) if len(text) < STATES]:
            drafts = {}
            for i in open_:
                # Sometimes the likeliest, sometimes anything, as a function of the text so far.
                token, row = texts[i][-1], []
                for step in range(num_drafts):
                    token = guess[token] if (token + step) % 2 else (token * 5 + 2) % VOCAB
                    row.append(token)
                drafts[i] = row
            rows = [(lives[i], 1 + num_drafts, True) for i in open_]
            plan = driver.plan(rows, drafts=[num_drafts] * len(open_))
            plan.drafts = drafts
            result = runner.step(plan).result()
            for row_index, i in enumerate(open_):
                num = int(result.counts[row_index])
                texts[i] += result.token_ids[row_index, :num].tolist()
                lives[i].computed -= int(result.rejected[row_index])
        for text in texts:
            counts[tuple(text[:STATES])] += 1
    return counts


def z_score(counts: np.ndarray, params: SamplingParams) -> float:
    """Chi-square of the joint counts against the exact product, in standard deviations."""
    p = chance(Bigram(), params)
    exact = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    want, got = exact.ravel() * counts.sum(), counts.ravel()
    assert got[want == 0].sum() == 0
    want, got = want[want > 0], got[want > 0]
    large = want >= 5  # rare cells together
    want = np.append(want[large], want[~large].sum() + 1e-9)
    got = np.append(got[large], got[~large].sum())
    statistic, df = float(((got - want) ** 2 / want).sum()), len(want) - 1
    return (statistic - df) / math.sqrt(2 * df)


PLAIN = SamplingParams(temperature=1.0, max_tokens=9)
SHARP = SamplingParams(temperature=0.7, top_k=4, max_tokens=9)


@pytest.mark.parametrize("params", [PLAIN, SHARP], ids=["plain", "sharp"])
@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_joint_distribution_is_that_of_the_model(params: SamplingParams, num_drafts: int) -> None:
    assert abs(z_score(triples(params, num_drafts, 16), params)) < 3.7


def _accepts_all(self: ModelRunner, sampled: Any, layout: Any, dev: Any) -> Verified:
    """A verifier that believes every first draft."""
    tokens = sampled.tokens.to(torch.int32)
    if layout.max_drafts == 0:
        return Verified(tokens[:, None], torch.ones_like(tokens), sampled.status)
    first = dev["first"]
    drafted = self.batch.tokens[dev["slot"][first], dev["position"][first] + 1]
    both = torch.stack((drafted, tokens[first + 1]), 1)
    return Verified(both, torch.full_like(drafted, 2), sampled.status[first])


def test_negative_control_a_credulous_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_verify", _accepts_all)
    assert z_score(triples(PLAIN, 1, 8), PLAIN) > 20


def test_negative_control_noise_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise for the row of a draft and the one after it, as if a stream were shared."""
    draw = sampler_module.draw

    def broken(z: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draw(z, seeds, positions // 2)

    monkeypatch.setattr(sampler_module, "draw", broken)
    assert z_score(triples(PLAIN, 2, 16), PLAIN) > 10


def test_the_sampler_of_hosts_draws_the_same() -> None:
    """Sampling row by row and all rows at once is one distribution, token by token."""
    dense, rows = triples(SHARP, 2, 1, slots=60), triples(SHARP, 2, 1, slots=60, dense=False)
    assert dense.tolist() == rows.tolist()


def test_drafts_are_checked_by_the_runner() -> None:
    model = FakeModel()
    runner = RunnerExecutor(model, 100, 2).runner
    driver = Driver(2)
    live, admit = driver.admit(0, PROMPTS[0])
    runner.step(driver.plan([(live, 10, True)], [admit]))
    plan = driver.plan([(live, 3, True)], drafts=[2])
    plan.drafts = {0: [1]}
    with pytest.raises(Exception, match="1 draft ids for 2 drafts"):
        runner.prepare(plan)
    plan.drafts = {0: [-5, 10**12]}  # guesses of any size are legal ids on the device
    runner.step(plan)
    ids = runner.batch.tokens[0, : 13 + 1]
    assert 0 <= int(ids.min()) <= int(ids.max()) < 48
    assert list(itertools.chain(*plan.drafts.values())) == [-5, 10**12]
