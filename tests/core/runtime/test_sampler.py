"""Every stage of the sampler against a short loop in numpy, and what no stage may do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from cardcage.core.contracts import SampleRows
from cardcage.core.runtime.batch import BatchState
from cardcage.core.runtime.layout import layout_of
from cardcage.core.runtime.rng import draw_numpy
from cardcage.core.runtime.sample_plan import SamplePlan, top_of
from cardcage.core.runtime.sampler import (
    NOT_A_NUMBER,
    NOTHING_LEFT,
    Sampled,
    Sampler,
)
from cardcage.core.runtime.slot_params import Feature
from cardcage.core.types import KVGroupSpec, SamplingParams, SlotAdmit, StepPlan

V = 40
GROUPS = (KVGroupSpec("a", "full", 4, 256),)
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Row:
    """One request: history (prompt and outputs), drafts, parameters."""

    params: SamplingParams
    prompt: Sequence[int] = (1, 2, 3)
    outputs: Sequence[int] = ()
    drafts: Sequence[int] = ()
    seed: int = 0
    eos: tuple[int, ...] = ()

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.outputs]


@dataclass
class Bench:
    """Rows admitted to slots in a given order, and the plan of one step that samples them all."""

    rows: list[Row]
    slots: list[int] = field(default_factory=list)
    plugins: Sequence[object] = ()
    mode: str = "raw_logprobs"

    def __post_init__(self) -> None:
        self.slots = self.slots or list(range(len(self.rows)))
        self.batch = BatchState(max(self.slots) + 1, 64, V, GROUPS, CPU)
        self.sampler = Sampler(self.batch, self.plugins, self.mode)
        plan = StepPlan(
            step=1,
            slots=np.array(self.slots, np.int32),
            starts=np.array([len(r.known) - 1 for r in self.rows], np.int32),
            num_tokens=np.array([1 + len(r.drafts) for r in self.rows], np.int32),
            num_drafts=np.array([len(r.drafts) for r in self.rows], np.int32),
            samples=np.ones(len(self.rows), np.bool_),
            admits=[
                SlotAdmit(
                    slot, f"r{slot}", r.known, len(r.prompt), 0, r.params, r.seed, r.eos, ([1],)
                )
                for slot, r in zip(self.slots, self.rows)
            ],
        )
        deltas = self.batch.prepare(plan)
        for slot, row in zip(self.slots, self.rows):
            self.sampler.admit(slot, list(row.prompt))
        self.layout = layout_of(plan)
        self.plan: SamplePlan = self.sampler.plan(self.layout)
        uploads = {**deltas.uploads, **self.plan.uploads}
        self.dev = {k: torch.from_numpy(v) for k, v in uploads.items()}
        self.batch.apply(deltas, self.dev)
        for slot, row in zip(self.slots, self.rows):
            at = len(row.known)
            self.batch.tokens[slot, at : at + len(row.drafts)] = torch.tensor(row.drafts).int()

    def sample(self, logits: torch.Tensor) -> Sampled:
        return self.sampler(logits, self.plan, self.dev)

    def shaped(self, logits: torch.Tensor) -> np.ndarray:
        """The logits that the draw sees, float32 [N, V], where rows are masked as a whole."""
        seen: list[torch.Tensor] = []
        self.sampler._by_row = lambda *_: False
        draw = self.sampler._draw
        self.sampler._draw = lambda z, *rest: seen.append(z.clone()) or draw(z, *rest)
        self.sample(logits)
        return seen[0].numpy()


def noise(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def reference(z: np.ndarray, row: Row, local: int = 0) -> np.ndarray:
    """Stages 3 to 12 for one row, token by token."""
    p, z = row.params, z.astype(np.float64).copy()
    outputs = [*row.outputs, *row.drafts[:local]]
    for v in range(V):
        if p.allowed_token_ids is not None and v not in p.allowed_token_ids:
            z[v] = -math.inf
        z[v] += min(100.0, max(-100.0, (p.logit_bias or {}).get(v, 0.0)))
        if len(outputs) < p.min_tokens and v in (*row.eos, *p.stop_token_ids):
            z[v] = -math.inf
        count = outputs.count(v)
        if count or v in row.prompt:
            z[v] = z[v] / p.repetition_penalty if z[v] > 0 else z[v] * p.repetition_penalty
        z[v] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    for word in p.bad_words_ids:
        tail = list(word[:-1])
        if not tail or outputs[-len(tail) :] == tail:
            z[word[-1]] = -math.inf
    if not p.greedy:
        z /= p.temperature
        z[z < z.max() + (math.log(p.min_p) if p.min_p else -math.inf)] = -math.inf
        ranked = np.sort(z)[::-1]
        z[z < (ranked[p.top_k - 1] if 0 < p.top_k < V else -math.inf)] = -math.inf
        ranked = np.sort(z)[::-1]
        mass = np.cumsum(np.exp(ranked - ranked[0])) / np.exp(ranked - ranked[0]).sum()
        z[
            z < (ranked[np.searchsorted(mass, p.top_p - 1e-9)] if p.top_p < 1 else -math.inf)
        ] = -math.inf
    return z


STAGES = {
    "allowed": {"allowed_token_ids": (0, V - 1, 7, 7, 12)},
    "bias": {"logit_bias": {0: 3.0, V - 1: -500.0, 5: 500.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (0, 9, 9)},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.3},
    "bad_words": {"bad_words_ids": ((4,), (8, 5), (6, 8, 5), (9, 9, 9), (3, 11))},
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "top_k_top_p": {"top_k": 9, "top_p": 0.8, "temperature": 1.4},
    "everything": {
        "allowed_token_ids": tuple(range(0, V, 2)), "logit_bias": {2: 1.0, 4: -1.0},
        "min_tokens": 9, "stop_token_ids": (6,), "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "bad_words_ids": ((8,), (8, 10)),
        "temperature": 0.8, "min_p": 0.01, "top_k": 12, "top_p": 0.9,
    },
}  # fmt: skip


def row_of(stage: str, drafts: Sequence[int] = ()) -> Row:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, **STAGES[stage]})
    return Row(params, (1, 2, 3, 11, 0), (9, 6, 8, 5, 9, 9)[: 6 - len(drafts)], drafts, 77, (1,))


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_stage_equals_its_loop(stage: str, scale: float) -> None:
    row, z = row_of(stage), noise(1, len(stage), scale)
    z[0, 3] = 0.0  # penalties at exactly zero
    got = Bench([row]).shaped(z)[0]
    np.testing.assert_allclose(got, reference(z[0].numpy(), row), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("stage", list(STAGES))
def test_rows_after_drafts_equal_rows_after_outputs(stage: str) -> None:
    row, z = row_of(stage, drafts=(5, 9, 9)), noise(4, 3)
    got = Bench([row]).shaped(z)
    for local in range(4):
        alone = Row(row.params, row.prompt, [*row.outputs, *row.drafts[:local]], (), 77, (1,))
        np.testing.assert_array_equal(got[local], Bench([alone]).shaped(z[local : local + 1])[0])
        np.testing.assert_allclose(got[local], reference(z[local].numpy(), row, local), atol=2e-6)


def mixed_rows() -> list[Row]:
    rows = [row_of(stage) for stage in STAGES]
    rows += [Row(GREEDY), Row(SamplingParams(seed=3), seed=3), row_of("everything", (4, 9))]
    rows.append(Row(SamplingParams(temperature=0.0, repetition_penalty=2.0), outputs=(4, 4)))
    return rows


def test_a_row_of_a_mixed_batch_equals_the_row_alone() -> None:
    rows = mixed_rows()
    counts = [1 + len(r.drafts) for r in rows]
    z = noise(sum(counts), 11)
    firsts = np.cumsum(counts) - counts
    alone = []
    for row, first, count in zip(rows, firsts, counts):
        alone.append(Bench([row]).sample(z[first : first + count]).tokens.tolist())
    together = Bench(rows).sample(z).tokens.tolist()
    assert together == [token for tokens in alone for token in tokens]

    order = np.random.default_rng(0).permutation(len(rows))
    slots = [int(s) for s in np.random.default_rng(1).permutation(len(rows) + 5)[: len(rows)]]
    index = np.concatenate([np.arange(firsts[i], firsts[i] + counts[i]) for i in order])
    moved = Bench([rows[i] for i in order], slots).sample(z[index]).tokens.tolist()
    assert moved == [token for i in order for token in alone[i]]


@pytest.mark.parametrize("scale", [0.3, 2.0, 9.0])
def test_row_by_row_equals_masking_whole_rows(scale: float) -> None:
    rows = mixed_rows()
    z = noise(sum(1 + len(r.drafts) for r in rows), 12, scale)
    by_row, masked = Bench(rows), Bench(rows)
    assert by_row.sampler._by_row(by_row.plan, z)
    masked.sampler._by_row = lambda *_: False
    first, second = by_row.sample(z), masked.sample(z)
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.status.tolist() == second.status.tolist()


def test_draw_is_the_plain_reference_draw() -> None:
    params = SamplingParams(temperature=0.8)
    rows = [Row(params, seed=s, outputs=[4] * s) for s in range(1, 9)]
    z = noise(8, 5)
    got = Bench(rows).sample(z).tokens.tolist()
    for i, row in enumerate(rows):
        shaped = (z[i].numpy() / np.float32(0.8)).astype(np.float32)
        assert got[i] == draw_numpy(shaped, row.seed, len(row.known) - 1)


def test_seeded_draws_follow_the_truncated_softmax() -> None:
    params = SamplingParams(temperature=0.7, top_k=6)
    z = noise(1, 9, 1.0)
    bench = Bench([Row(params, seed=s) for s in range(4000)])
    ids = bench.sample(z.expand(4000, -1).contiguous()).tokens.numpy()
    shaped = reference(z[0].numpy(), Row(params))
    p = np.exp(shaped - shaped[np.isfinite(shaped)].max())
    p /= p.sum()
    counts = np.bincount(ids, minlength=V)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    statistic = ((counts[kept] - 4000 * p[kept]) ** 2 / (4000 * p[kept])).sum()
    assert statistic < 20.5  # chi-square with 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_lowest_of_the_best(dtype: torch.dtype) -> None:
    z = noise(3).to(dtype)
    z[0, [5, 9]] = 50.0
    z[1] = 1.0
    got = Bench([Row(GREEDY)] * 3).sample(z)
    assert got.tokens.tolist() == [5, 0, int(z[2].float().argmax())]
    assert got.status.tolist() == [0, 0, 0]


def test_neutral_parameters_leave_the_logits_bitwise() -> None:
    z = noise(4, 2)
    rows = [Row(SamplingParams(seed=s), seed=s) for s in range(3)] + [row_of("everything")]
    got = Bench(rows).shaped(z)
    assert np.array_equal(got[:3], z[:3].numpy())


def test_raw_logits_are_never_changed() -> None:
    rows = mixed_rows()
    z = noise(sum(1 + len(r.drafts) for r in rows))
    before = z.clone()
    Bench(rows).sample(z)
    assert torch.equal(z, before)


def test_no_finite_logit_is_reported_and_never_a_token() -> None:
    contradiction = SamplingParams(allowed_token_ids=(3,), bad_words_ids=((3,),))
    only_eos = SamplingParams(allowed_token_ids=(7,), min_tokens=5, max_tokens=9)
    z = noise(5)
    z[2] = torch.nan
    z[3, 4] = torch.inf
    rows = [Row(contradiction), Row(only_eos, eos=(7,)), Row(GREEDY), Row(GREEDY), Row(GREEDY)]
    got = Bench(rows).sample(z)
    assert got.status.tolist() == [NOTHING_LEFT, NOTHING_LEFT, NOT_A_NUMBER, NOT_A_NUMBER, 0]
    assert got.tokens.min() >= 0
    assert got.tokens.max() < V


def test_min_tokens_ends_when_reached() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9, stop_token_ids=(6,))
    z = torch.zeros(1, V)
    z[0, 6] = 9.0
    for num in range(6):
        got = int(Bench([Row(params, outputs=[4] * num)]).sample(z).tokens[0])
        assert (got == 6) == (num >= 3)


def test_bad_words_look_at_outputs_only() -> None:
    params = SamplingParams(temperature=0.0, bad_words_ids=((2, 3, 5),))
    z = torch.zeros(1, V)
    z[0, 5] = 9.0
    assert int(Bench([Row(params, prompt=(2, 3))]).sample(z).tokens[0]) == 5
    assert int(Bench([Row(params, prompt=(2,), outputs=(3,))]).sample(z).tokens[0]) == 5
    assert int(Bench([Row(params, outputs=(2, 3))]).sample(z).tokens[0]) == 0
    assert int(Bench([Row(params, outputs=(2,), drafts=())]).sample(z).tokens[0]) == 5


# ---- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [
    "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits",
])  # fmt: skip
def test_logprobs_by_mode(mode: str) -> None:
    params = SamplingParams(temperature=0.5, top_k=8, logprobs=4, logit_bias={3: 2.0})
    plain = SamplingParams(temperature=0.0)
    rows = [Row(plain), Row(params, seed=5), Row(params, seed=6)]
    z = noise(3, 8)
    bench = Bench(rows, mode=mode)
    sampled = bench.sample(z)
    assert bench.plan.logprob_rows.tolist() == [1, 2]
    assert sampled.logprobs is not None
    for i, row in enumerate((1, 2)):
        shown = z[row].numpy().astype(np.float64)
        if mode.startswith("processed"):
            shown = reference(z[row].numpy(), rows[row])
        if mode.endswith("logprobs"):
            shown = shown - np.log(np.exp(shown[np.isfinite(shown)]).sum())
        token = int(sampled.tokens[row])
        assert float(sampled.logprobs.value[i]) == pytest.approx(shown[token], abs=1e-5)
        assert int(sampled.logprobs.rank[i]) == int((shown >= shown[token]).sum())
        top = np.sort(shown)[::-1][:4]
        np.testing.assert_allclose(sampled.logprobs.top_value[i].numpy(), top, atol=1e-5)


def test_whole_vocabulary_and_chosen_only() -> None:
    rows = [Row(SamplingParams(temperature=0.0, logprobs=n)) for n in (-1, 0, 3)]
    bench = Bench(rows)
    got = bench.sample(noise(3)).logprobs
    assert got is not None
    assert got.top_value.shape == (3, V)
    assert [top_of(bench.batch, i) for i in range(3)] == [V, 0, 3]
    np.testing.assert_allclose(np.exp(got.top_value.numpy()).sum(-1), 1.0, rtol=1e-5)
    assert got.rank.tolist() == [1, 1, 1]


# ---- plugins ------------------------------------------------------------------------------------


class Force:
    """Forces a token that depends on the whole history; only for requests with ext["force"]."""

    def __init__(self, order: float = 9, argmax_invariant: bool = False) -> None:
        self.order, self.argmax_invariant = order, argmax_invariant
        self.live: set[int] = set()
        self.calls = 0

    def validate(self, params: SamplingParams) -> str | None:
        return "force must be true" if (params.ext or {}).get("force") == "bad" else None

    def admit(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int]) -> bool:
        if not (params.ext or {}).get("force"):
            return False
        self.live.add(slot)
        return True

    def release(self, slot: int) -> None:
        self.live.remove(slot)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        self.calls += 1
        for i in range(len(logits)):
            token = int(rows.history(i).sum()) % V
            logits[i] = -torch.inf
            logits[i, token] = 1.0


def test_plugin_sees_drafts_and_touches_its_rows_only() -> None:
    forced = SamplingParams(temperature=0.0, ext={"force": True})
    rows = [Row(GREEDY), Row(forced, (1, 2, 3), (9,), (5, 6)), Row(forced, (4,))]
    z = noise(5)
    plugin = Force()
    got = Bench(rows, plugins=[plugin]).sample(z).tokens.tolist()
    assert got[0] == int(z[0].argmax())
    assert got[1:] == [15, 20, 26, 4]
    assert plugin.live == {1, 2}


def test_plugin_order_and_argmax_invariance() -> None:
    params = SamplingParams(temperature=0.0, ext={"force": True}, bad_words_ids=((6,),))
    row, z = Row(params, (1, 2, 3)), torch.zeros(1, V)
    assert Bench([row], plugins=[Force(9)]).sample(z).status.tolist() == [0]
    # Before stage 7 the ban comes after the plugin's choice and leaves nothing.
    assert Bench([row], plugins=[Force(3.5)]).sample(z).status.tolist() == [NOTHING_LEFT]
    skipped = Force(argmax_invariant=True)
    Bench([row], plugins=[skipped]).sample(z)
    assert skipped.calls == 0


def test_plugin_refuses_a_request_alone_and_forgets_released_slots() -> None:
    bad = SamplingParams(ext={"force": "bad"})
    good = SamplingParams(ext={"force": True})
    bench = Bench([Row(bad), Row(good)], plugins=[plugin := Force()])
    slot = bench.batch.slots[0]
    assert slot is not None
    assert slot.error == "force must be true"
    assert plugin.live == {1}
    bench.sampler.reset()
    assert plugin.live == set()


def test_captured_plans_read_the_table() -> None:
    rows = [Row(GREEDY), Row(SamplingParams(temperature=0.7, top_k=4), seed=9)]
    bench, z = Bench(rows), noise(2)
    union = Feature.RANDOM | Feature.TEMPERATURE | Feature.MIN_P | Feature.TRUNCATE
    dev = {"slot": bench.dev["slot"], "position": bench.dev["position"]}
    got = bench.sampler(z, SamplePlan(2, union, from_table=True), dev)
    assert got.tokens.tolist() == bench.sample(z).tokens.tolist()
