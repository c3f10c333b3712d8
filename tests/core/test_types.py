"""The nouns: ranges of the sampling parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cardcage.core.errors import InvalidRequest
from cardcage.core.types import MAX_REPETITION, SamplingParams, shown

HUGE = 10**5000  # str() refuses it, and it has no float
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty")  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS + NUMBERS)
@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, 10**400, float("nan"), float("inf"), "1", [], True], ids=shown
)
def test_no_value_of_a_number_is_more_than_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "stop", "bad_words"])
@pytest.mark.parametrize(
    "value", [5, [HUGE], [-1], [True], [1.5], {"a": 1}, b"ab", [[1]], [""]], ids=shown
)
def test_no_value_of_a_list_is_more_than_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "value", [[1], 5, "1", {"a": 1}, {1: "x"}, {HUGE: 1}, {1: HUGE}, {1: None}, {-1: 1}], ids=shown
)
def test_no_value_of_logit_bias_is_more_than_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias=value)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("value", [0, 1e-320, 1e-7, 1e7, 1e300], ids=shown)
def test_repetition_penalties_that_leave_float32_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value)


def test_logits_stay_finite_under_every_allowed_penalty() -> None:
    logits = np.float32([1e4, -1e4])
    for value in (1 / MAX_REPETITION, MAX_REPETITION):
        penalty = np.float32(SamplingParams(repetition_penalty=value).repetition_penalty)
        assert np.isfinite([logits / penalty, logits * penalty]).all()


def test_shown_is_short_and_never_fails() -> None:
    assert shown(5) == "5"
    assert shown("x" * 200) == "x" * 80
    assert shown(HUGE) == "an integer of 16610 bits"
    assert shown(-HUGE) == "an integer of 16610 bits"
    assert shown([HUGE]) == "a list"
