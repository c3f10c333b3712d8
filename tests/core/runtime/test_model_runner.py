"""Whole steps on a small causal model: chunks, batches, preemption, drafts, log-probabilities."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cardcage.core.runtime import model_runner
from cardcage.core.runtime.batch import BatchState
from cardcage.core.runtime.kv_pool import KVPool
from cardcage.core.runtime.model_runner import ModelRunner
from cardcage.core.runtime.profile import dummy_step, warm_up
from cardcage.core.runtime.sampler import Sampler
from cardcage.core.types import SamplingParams, StepResult
from tests.support.fake_model import Driver, FakeModel, Live

CPU = torch.device("cpu")
PROMPT = [5, 3, 7, 9, 1, 2, 30, 40, 22, 11]
SEEDED = SamplingParams(temperature=0.9, top_k=12, frequency_penalty=0.4, max_tokens=99)


def make(slots: int = 6, pages: int = 400, **model: object) -> tuple[ModelRunner, Driver]:
    fake = FakeModel(**model)  # type: ignore[arg-type]
    groups = fake.kv_groups()
    pool = KVPool(groups, pages * groups[0].page_bytes, CPU)
    # What kernels must mask: unused cache holds NaN, but for the null blocks.
    pool.buffer[groups[0].page_bytes :].fill_(255)
    batch = BatchState(slots, 64, fake.vocab, groups, CPU)
    return ModelRunner(fake, pool, batch, Sampler(batch)), Driver(len(groups))


def tokens_of(result: StepResult, row: int = 0) -> list[int]:
    return result.token_ids[row, : result.counts[row]].tolist()


def generate(
    runner: ModelRunner,
    driver: Driver,
    live: Live,
    admit: object,
    num: int,
    chunks: list[int] | None = None,
) -> list[int]:
    """Prefill in chunks, then decode alone, reading every result at once."""
    out: list[int] = []
    todo = len(live.tokens) - live.computed
    chunks = chunks or [todo]
    assert sum(chunks) == todo
    for i, chunk in enumerate(chunks):
        last = i == len(chunks) - 1
        result = runner.step(driver.plan([(live, chunk, last)], [admit] if i == 0 else []))
        out += tokens_of(result.result())
    while len(out) < num:
        out += tokens_of(runner.step(driver.plan([(live, 1, True)])).result())
    return out


def seeded_alone(prompt: list[int], num: int, params: SamplingParams, seed: int) -> list[int]:
    runner, driver = make()
    return generate(runner, driver, *driver.admit(0, prompt, params=params, seed=seed), num)


def test_greedy_equals_the_model_without_a_cache() -> None:
    runner, driver = make()
    live, admit = driver.admit(2, PROMPT)
    assert generate(runner, driver, live, admit, 13) == FakeModel().greedy(PROMPT, 13)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SEEDED])
def test_any_split_of_a_prompt_gives_the_same_tokens(params: SamplingParams) -> None:
    whole = seeded_alone(PROMPT, 8, params, 5)
    rng = random.Random(0)
    for _ in range(12):
        cuts = sorted(rng.sample(range(1, len(PROMPT)), rng.randint(1, 5)))
        chunks = [b - a for a, b in zip([0, *cuts], [*cuts, len(PROMPT)])]
        runner, driver = make()
        live, admit = driver.admit(1, PROMPT, params=params, seed=5)
        assert generate(runner, driver, live, admit, 8, chunks) == whole


def test_steps_in_flight_need_no_ids_from_the_host() -> None:
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT, params=SEEDED, seed=1)
    handles = [runner.step(driver.plan([(live, len(PROMPT), True)], [admit]))]
    handles += [runner.step(driver.plan([(live, 1, True)])) for _ in range(9)]
    got = [t for handle in handles for t in tokens_of(handle.result())]
    assert got == seeded_alone(PROMPT, 10, SEEDED, 1)


def test_preparing_ahead_of_running_changes_nothing() -> None:
    """The next plan is prepared while a step has not even started (a host with a thread)."""
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT, params=SEEDED, seed=1)
    other, admit_other = driver.admit(1, PROMPT[:4], seed=2)
    first = runner.prepare(driver.plan([(live, len(PROMPT), True)], [admit]))
    second = runner.prepare(driver.plan([(live, 1, True), (other, 4, True)], [admit_other]))
    third = runner.prepare(driver.plan([(live, 1, True)], releases=[1]))
    results = [runner.run(p).result() for p in (first, second, third)]
    assert [t for r in results for t in tokens_of(r)] == seeded_alone(PROMPT, 3, SEEDED, 1)


def test_random_schedules_never_change_a_request() -> None:
    """Strangers come and go, prompts are cut anywhere, requests are preempted and resumed."""
    rng = random.Random(3)
    prompts = [[rng.randrange(48) for _ in range(rng.randint(1, 14))] for _ in range(10)]
    kinds = [SamplingParams(temperature=0.0), SEEDED, SamplingParams(temperature=1.2),
             SamplingParams(temperature=0.0, repetition_penalty=1.5),
             SamplingParams(temperature=0.8, top_p=0.8, min_p=0.02)]  # fmt: skip
    params = [kinds[i % len(kinds)] for i in range(10)]
    wanted = [seeded_alone(p, 9, params[i], i) for i, p in enumerate(prompts)]

    runner, driver = make(slots=4)
    waiting, running = list(range(10)), {}
    outputs: dict[int, list[int]] = {i: [] for i in range(10)}
    while waiting or running:
        releases, admits, rows, owners = [], [], [], []
        for i, live in list(running.items()):
            known = len(prompts[i]) + len(outputs[i])
            if len(outputs[i]) >= 9 or (rng.random() < 0.1 and live.computed == known - 1):
                releases.append(driver.free(live))
                del running[i]
                if len(outputs[i]) < 9:
                    waiting.append(i)  # preempted: comes back with all its tokens
        free = [s for s in range(4) if s not in {live.slot for live in running.values()}]
        while waiting and free and rng.random() < 0.7:
            i, slot = waiting.pop(0), free.pop(rng.randrange(len(free)))
            live, admit = driver.admit(slot, prompts[i] + outputs[i], len(prompts[i]), params[i], i)
            running[i] = live
            admits.append(admit)
        for i, live in running.items():
            left = len(prompts[i]) + len(outputs[i]) - live.computed
            num = rng.randint(1, left)
            if rng.random() < 0.85:
                rows.append((live, num, num == left))
                owners.append(i)
        order = sorted(range(len(rows)), key=lambda r: rows[r][1] > 1)
        rows, owners = [rows[r] for r in order], [owners[r] for r in order]
        result = runner.step(driver.plan(rows, admits, releases)).result()
        assert result.errors == {}
        for row, i in enumerate(owners):
            outputs[i] += tokens_of(result, row)
    assert [outputs[i] for i in range(10)] == wanted


def test_prefix_hit_reads_blocks_of_another_request() -> None:
    runner, driver = make()
    first, admit = driver.admit(0, PROMPT)
    generate(runner, driver, first, admit, 3)
    second, admit = driver.admit(1, [*PROMPT[:8], 4, 4], computed=8)
    for g in range(2):
        admit.block_ids[g][:2] = first.blocks[g][:2]
        second.blocks[g][:2] = first.blocks[g][:2]
    assert generate(runner, driver, second, admit, 5) == FakeModel().greedy([*PROMPT[:8], 4, 4], 5)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0), SEEDED,
    SamplingParams(temperature=0.0, repetition_penalty=1.4, bad_words_ids=((7,), (11, 8))),
])  # fmt: skip
@pytest.mark.parametrize("quality", ["right", "wrong", "mixed"])
def test_drafts_never_change_the_text(params: SamplingParams, quality: str) -> None:
    wanted = seeded_alone(PROMPT, 24, params, 9)
    rng = random.Random(1)
    runner, driver = make()
    live, admit = driver.admit(3, PROMPT, params=params, seed=9)
    out = generate(runner, driver, live, admit, 1)
    steps = 0
    while len(out) < 20:
        num = rng.randint(1, 3)
        right = wanted[len(out) : len(out) + num]
        drafts = {
            "right": right,
            "wrong": [(t + 1) % 48 for t in right],
            "mixed": [t if rng.random() < 0.6 else 9999 for t in right],
        }[quality]
        at = live.computed + 1
        runner.batch.tokens[3, at : at + num] = torch.tensor(drafts, dtype=torch.int32)
        result = runner.step(driver.plan([(live, 1 + num, True)], drafts=[num])).result()
        emitted = tokens_of(result)
        assert len(emitted) + result.rejected[0] == 1 + num
        out += emitted
        live.computed -= int(result.rejected[0])
        steps += 1
    assert out == wanted[: len(out)]
    if quality == "right":
        assert steps < 14
    assert runner.batch.counts.shape[0] == 0 or penalised(runner, live, out, params)


def penalised(runner: ModelRunner, live: Live, out: list[int], params: SamplingParams) -> bool:
    """The counts on the device are those of the emitted tokens, drafts never counted."""
    slot = runner.batch.slots[live.slot]
    assert slot is not None
    counts = runner.batch.counts[slot.penalty_row] & (2**30 - 1)
    return counts.tolist() == [out.count(v) for v in range(48)]


def test_drafting_rows_beside_ordinary_ones() -> None:
    runner, driver = make()
    a, admit_a = driver.admit(0, PROMPT)
    b, admit_b = driver.admit(1, PROMPT[:5], params=SEEDED, seed=4)
    c, admit_c = driver.admit(2, PROMPT[:7])
    rows = [(a, 10, True), (b, 5, True), (c, 4, False)]
    first = runner.step(driver.plan(rows, [admit_a, admit_b, admit_c])).result()
    wanted = FakeModel().greedy(PROMPT, 4)
    assert tokens_of(first) == wanted[:1]
    runner.batch.tokens[0, 11:13] = torch.tensor([wanted[1], 47 - wanted[2]]).int()
    plan = driver.plan([(a, 3, True), (b, 1, True), (c, 3, True)], drafts=[2, 0, 0])
    second = runner.step(plan).result()
    assert second.counts.tolist() == [2, 1, 1]
    assert second.rejected.tolist() == [1, 0, 0]
    assert tokens_of(second, 0) == wanted[1:3]
    assert tokens_of(second, 1) == seeded_alone(PROMPT[:5], 2, SEEDED, 4)[1:]
    assert tokens_of(second, 2) == FakeModel().greedy(PROMPT[:7], 1)


# ---- log-probabilities --------------------------------------------------------------------------


def test_logprobs_of_emitted_tokens_with_drafts() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT, params=params)
    wanted = FakeModel().greedy(PROMPT, 6)
    first = runner.step(driver.plan([(live, 10, True)], [admit])).result()
    runner.batch.tokens[0, 11:14] = torch.tensor([*wanted[1:3], 47 - wanted[3]]).int()
    second = runner.step(driver.plan([(live, 4, True)], drafts=[3])).result()
    entries = first.logprobs[0] + second.logprobs[0]
    assert [e.token_id for e in entries] == wanted[:4]
    full = torch.log_softmax(FakeModel().reference(PROMPT + wanted[:3])[9:].double(), -1)
    for entry, row in zip(entries, full):
        assert entry.rank == 1
        assert entry.logprob == pytest.approx(float(row.max()), abs=1e-5)
        assert len(entry.top) == 2
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert entry.top[1][1] == pytest.approx(float(row.topk(2).values[1]), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize("rows_at_once", [2, 1024])
def test_prompt_logprobs_cover_the_prompt(
    chunk: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "_PROMPT_CHUNK", rows_at_once)
    runner, driver = make()
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    live, admit = driver.admit(0, PROMPT, params=params)
    other, admit_other = driver.admit(1, PROMPT[:3], params=SamplingParams(prompt_logprobs=-1))
    got = []
    admits, rows = [admit, admit_other], [(other, 3, True)]
    while live.computed < 10:
        num = min(chunk, 10 - live.computed)
        plan = driver.plan([*rows, (live, num, live.computed + num == 10)], admits)
        result = runner.step(plan).result()
        if rows:
            assert len(result.prompt_logprobs[0]) == 2
            assert len(result.prompt_logprobs[0][0].top) == 48
        got += result.prompt_logprobs.get(len(rows), [])
        admits, rows = [], []
    full = torch.log_softmax(FakeModel().reference(PROMPT).double(), -1)
    assert [e.token_id for e in got] == PROMPT[1:]
    for i, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(full[i, PROMPT[i + 1]]), abs=1e-5)
        assert entry.rank == int((full[i] >= full[i, PROMPT[i + 1]]).sum())
        assert len(entry.top) == 3


# ---- errors, deltas, edges ----------------------------------------------------------------------


def test_a_bad_request_fails_alone() -> None:
    runner, driver = make()
    good, admit_good = driver.admit(0, PROMPT)
    bad, admit_bad = driver.admit(1, [4, 48, 5])
    hopeless = SamplingParams(allowed_token_ids=(3,), bad_words_ids=((3,),))
    stuck, admit_stuck = driver.admit(2, PROMPT[:3], params=hopeless)
    rows = [(good, 10, True), (bad, 3, True), (stuck, 3, True)]
    result = runner.step(driver.plan(rows, [admit_good, admit_bad, admit_stuck])).result()
    assert tokens_of(result) == FakeModel().greedy(PROMPT, 1)
    assert sorted(result.errors) == [1, 2]
    assert "outside 0..47" in result.errors[1]
    assert "constraints exclude all" in result.errors[2]
    assert result.counts.tolist() == [1, 0, 0]


def test_zeroed_and_copied_blocks() -> None:
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT)
    generate(runner, driver, live, admit, 2)
    fresh = [driver.blocks.take(g, 1)[0] for g in range(2)]
    plan = driver.plan([])
    plan.copies = [(g, live.blocks[g][1], fresh[g]) for g in range(2)]
    plan.zero_blocks = [(0, [live.blocks[0][0]])]
    result = runner.step(plan).result()
    assert len(result.counts) == 0
    for g in range(2):
        pages = runner.pool.pages(g)
        assert torch.equal(pages[fresh[g]], pages[live.blocks[g][1]])
    assert int(runner.pool.pages(0)[live.blocks[0][0]].sum()) == 0


def test_reset_frees_all_slots() -> None:
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT, params=SEEDED, seed=1)
    generate(runner, driver, live, admit, 3)
    runner.reset()
    live, admit = driver.admit(0, PROMPT, params=SEEDED, seed=1)
    assert generate(runner, driver, live, admit, 3) == seeded_alone(PROMPT, 3, SEEDED, 1)


def test_last_position_of_the_context() -> None:
    runner, driver = make()
    prompt = [i % 48 for i in range(64)]
    live, admit = driver.admit(0, prompt)
    got = runner.step(driver.plan([(live, 64, True)], [admit])).result()
    assert tokens_of(got) == FakeModel().greedy(prompt, 1)


def test_one_group_and_dummy_steps_leave_no_trace() -> None:
    runner, driver = make(windows=(0,))
    warm_up(runner, 64)
    live, admit = driver.admit(0, PROMPT)
    first = generate(runner, driver, live, admit, 3)
    before = runner.pool.buffer.clone()
    dummy_step(runner.model, [7, 1], CPU)
    warm_up(runner, 1)
    assert torch.equal(runner.pool.buffer, before)
    more = [tokens_of(runner.step(driver.plan([(live, 1, True)])).result())[0] for _ in range(3)]
    assert first + more == FakeModel(windows=(0,)).greedy(PROMPT, 6)


def test_handle_is_done_and_its_result_is_kept() -> None:
    runner, driver = make()
    live, admit = driver.admit(0, PROMPT)
    handle = runner.step(driver.plan([(live, 10, True)], [admit]))
    assert handle.done()
    assert handle.result() is handle.result()
    assert handle.result().token_ids.dtype == np.int32
