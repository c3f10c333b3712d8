"""Speculation on the embedded model: the ids of the reference, and the text without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cardcage import LLM, SamplingParams
from cardcage.core.errors import ConfigError, EngineError

Cases = list[dict[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
NGRAM = {
    "use": "ngram",
    "adaptive": False,
    "options": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
}
SUFFIX = {"use": "suffix", "adaptive": False}
CARDS = {"ngram": NGRAM, "suffix": SUFFIX, "adaptive": {"use": "suffix", "k": 8}}


def short(cases: Cases) -> Cases:
    return [case for case in cases if len(case["prompt_token_ids"]) <= 64][:2]


def answers(llm: LLM, cases: Cases, params: SamplingParams = GREEDY) -> list[list[int]]:
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("card", ["ngram", "suffix"])
def test_greedy_ids_are_those_of_the_reference(
    card: str, smollm2_path: Path, reference_cases: Cases
) -> None:
    cases = short(reference_cases)
    with LLM(str(smollm2_path), dtype="float32", speculator=CARDS[card]) as llm:
        assert answers(llm, cases) == [case["output_ids"] for case in cases]
        stats = llm.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.accepted_per_position[0] <= stats.draft_rows
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert stats.drafter_failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_all_cases_and_a_second_time(card: str, smollm2_path: Path, reference_cases: Cases) -> None:
    want = [case["output_ids"] for case in reference_cases]
    with LLM(str(smollm2_path), dtype="float32", speculator=CARDS[card]) as llm:
        assert answers(llm, reference_cases) == want
        before = llm.stats()
        assert answers(llm, reference_cases) == want
        after = llm.stats()
    assert after.prefix_hits > 0
    if card == "suffix":  # it remembers the answers
        again = after.accepted_tokens - before.accepted_tokens
        assert again > 2 * before.accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("card", ["ngram", "suffix"])
def test_seeded_text_is_that_without_drafts(
    card: str, smollm2_path: Path, reference_cases: Cases
) -> None:
    cases = short(reference_cases)
    drawn = SamplingParams(temperature=1.0, seed=11, max_tokens=32, ignore_eos=True)
    shaped = drawn.with_(top_p=0.9, frequency_penalty=0.5)
    with LLM(str(smollm2_path), dtype="float32") as llm:
        want = [answers(llm, cases, params) for params in (drawn, shaped)]
    with LLM(str(smollm2_path), dtype="float32", speculator=CARDS[card]) as llm:
        assert [answers(llm, cases, params) for params in (drawn, shaped)] == want
        assert llm.stats().draft_tokens > 0


@pytest.mark.slow
def test_a_tiny_pool_preempts_and_changes_nothing(
    smollm2_path: Path, reference_cases: Cases
) -> None:
    page = 16 * 30 * 2 * 3 * 64 * 4  # tokens x layers x (K, V) x heads x size x float32
    overrides = {"kv.bytes": 14 * page, "max_model_len": 192, "max_num_seqs": 16}
    cases = [case for case in reference_cases if len(case["prompt_token_ids"]) <= 64][:5]
    with LLM(str(smollm2_path), dtype="float32", speculator=NGRAM, **overrides) as llm:
        assert answers(llm, cases) == [case["output_ids"] for case in cases]
        assert llm.stats().preemptions > 0


def test_what_cannot_be_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(EngineError, match="nosuch"):
        LLM(str(smollm2_path), speculator={"use": "nosuch"})
    options = {"prompt_lookup_min": 5, "prompt_lookup_max": 2}
    with pytest.raises(ConfigError, match="prompt_lookup"):
        LLM(str(smollm2_path), speculator={"use": "ngram", "options": options})
