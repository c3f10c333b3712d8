"""Correctness is token equality: nothing the engine does to go faster changes a greedy answer.

The reference ids were made with transformers in float32 on the dequantized weights of the
embedded model. Chunking, caching, batching and preemption must reproduce them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cardcage import LLM, SamplingParams
from cardcage.core.types import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
Cases = list[dict[str, Any]]


def answers(llm: LLM, cases: Cases) -> list[list[int]]:
    """Greedy ids of all cases, submitted together."""
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def expected(cases: Cases) -> list[list[int]]:
    return [case["output_ids"] for case in cases]


def short(cases: Cases) -> Cases:
    """The cases with short prompts, for the runs that cost many steps."""
    return [case for case in cases if len(case["prompt_token_ids"]) <= 64][:5]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), dtype="float32") as engine:
        yield engine


def test_together_equals_the_reference(llm: LLM, reference_cases: Cases) -> None:
    prompts = [case["prompt"] for case in reference_cases]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for case, output in zip(reference_cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"], case["name"]
        assert output.outputs[0].token_ids == case["output_ids"], case["name"]
        top = output.outputs[0].logprobs[0]
        for entry in case["first_token_top5"]:
            assert abs(top[entry["id"]].logprob - entry["logprob"]) < 1e-3, case["name"]
        for step, want in zip(output.outputs[0].logprobs, case["output_logprobs"], strict=True):
            best = max(step.values(), key=lambda entry: entry.logprob)
            assert abs(best.logprob - want) < 1e-3, case["name"]


def test_alone_equals_together(llm: LLM, reference_cases: Cases) -> None:
    for case in short(reference_cases)[:3]:
        assert answers(llm, [case]) == expected([case])


def test_a_prefix_hit_changes_nothing(llm: LLM, reference_cases: Cases) -> None:
    longest = max(reference_cases, key=lambda case: len(case["prompt_token_ids"]))
    assert answers(llm, [longest]) == expected([longest])
    before = llm.stats().prefix_hits
    assert answers(llm, [longest]) == expected([longest])
    assert llm.stats().prefix_hits > before, "the second run should have been served by a hit"


@pytest.mark.parametrize("chunk", [7, 16])
def test_any_chunk_size_gives_the_same_ids(
    smollm2_path: Path, reference_cases: Cases, chunk: int
) -> None:
    cases = short(reference_cases)[:3]
    overrides = {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
    with LLM(str(smollm2_path), dtype="float32", **overrides) as engine:
        assert answers(engine, cases) == expected(cases)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_chunks_and_caching(
    smollm2_path: Path, reference_cases: Cases, chunk: int, caching: bool
) -> None:
    cases = reference_cases if chunk > 1 else short(reference_cases)[:2]
    overrides = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(chunk, 16),
        "enable_prefix_caching": caching,
    }
    with LLM(str(smollm2_path), dtype="float32", **overrides) as engine:
        assert answers(engine, cases) == expected(cases)
        assert answers(engine, cases) == expected(cases)


@pytest.mark.slow
def test_a_tiny_pool_preempts_and_changes_nothing(
    smollm2_path: Path, reference_cases: Cases
) -> None:
    page = 16 * 30 * 2 * 3 * 64 * 4  # tokens x layers x (K, V) x heads x size x float32
    pool = 14 * page
    overrides = {"kv.bytes": pool, "max_model_len": 192, "max_num_seqs": 16}
    cases = short(reference_cases)
    with LLM(str(smollm2_path), dtype="float32", **overrides) as engine:
        assert answers(engine, cases) == expected(cases)
        assert engine.stats().preemptions > 0, "the pool was meant to be too small"


@pytest.mark.slow
def test_preempted_at_every_step(llm: LLM, reference_cases: Cases) -> None:
    """After every step the request loses its slot and blocks, and starts again from its tokens."""
    case = short(reference_cases)[0]
    engine, scheduler = llm.engine, llm.engine.scheduler
    tokens: list[int] = []
    engine.add_request(
        Request(request_id="again", prompt_token_ids=case["prompt_token_ids"], params=GREEDY)
    )
    rounds = 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
        if "again" in scheduler.states:
            scheduler.park("again", "preempted by the test", deadline_s=math.inf)
            assert scheduler.wake("again")
            rounds += 1
    assert tokens == case["output_ids"]
    assert rounds >= 31


@pytest.mark.slow
def test_bfloat16_agrees_on_ten_of_twelve(smollm2_path: Path, reference_cases: Cases) -> None:
    with LLM(str(smollm2_path), dtype="bfloat16") as engine:
        got = answers(engine, reference_cases)
    same = sum(a == b for a, b in zip(got, expected(reference_cases), strict=True))
    assert same >= 10, f"{same} of {len(got)} cases agree in all 32 ids"
