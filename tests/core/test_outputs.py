"""Stop rules and token outputs."""

from __future__ import annotations

from typing import Any

import pytest

from cardcage.core.outputs import (
    append_tokens,
    build_outputs,
    collect_prompt_logprobs,
    ended_outputs,
    stop_tokens,
)
from cardcage.core.request_state import RequestState
from cardcage.core.torture_device import token_logprob
from cardcage.core.types import FinishReason, Request, SamplingParams, StepResult, TokenLogprob
from tests.support.core_rig import Rig

EOS = 0


def state_of(prompt: int = 3, max_len: int = 20, **params: Any) -> RequestState:
    request = Request(request_id="r", prompt_token_ids=list(range(1, prompt + 1)),
                      params=SamplingParams(**params), eos_token_ids=(EOS, 9))  # fmt: skip
    return RequestState(request=request, key=(0, 0), max_len=max_len, num_groups=1,
                        stops=stop_tokens(request))  # fmt: skip


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop"),
    [
        ({}, [5, 6], 2, None, None),
        ({}, [5, EOS, 6], 2, FinishReason.STOP, None),
        ({}, [9, 6], 1, FinishReason.STOP, None),
        ({"ignore_eos": True}, [EOS, 9, 6], 3, None, None),
        ({"stop_token_ids": (6,)}, [5, 6, 7], 2, FinishReason.STOP, 6),
        ({"stop_token_ids": (9,)}, [9], 1, FinishReason.STOP, None),  # end of sequence first
        ({"stop_token_ids": (9,), "ignore_eos": True}, [9], 1, FinishReason.STOP, 9),
        ({"min_tokens": 3}, [EOS, EOS, EOS, 5], 3, FinishReason.STOP, None),
        ({"min_tokens": 3, "stop_token_ids": (6,)}, [6, 6, 5, 6], 4, FinishReason.STOP, 6),
    ],
)
def test_stop_rules(
    params: dict[str, Any], tokens: list[int], kept: int, reason: object, stop: object
) -> None:
    state = state_of(**params)
    assert append_tokens(state, tokens) == kept
    assert state.tokens[3:] == tokens[:kept]
    assert (state.finish_reason, state.stop_reason) == (reason, stop)


def test_length_ends_and_a_stop_at_the_limit_is_a_stop() -> None:
    state = state_of(max_len=5)
    assert append_tokens(state, [5, 6, 7]) == 2
    assert state.finish_reason is FinishReason.LENGTH
    state = state_of(max_len=5)
    assert append_tokens(state, [5, EOS, 7]) == 2
    assert state.finish_reason is FinishReason.STOP
    state = state_of(max_len=5, min_tokens=9, max_tokens=9)  # the context ends before min_tokens
    append_tokens(state, [EOS, EOS, EOS])
    assert state.finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_over_chunks_and_again_after_a_preemption() -> None:
    state = state_of(prompt=5, prompt_logprobs=1)
    entries = [TokenLogprob(i, -float(i), 1) for i in range(10)]
    assert state.needs_whole_prompt
    collect_prompt_logprobs(state, 0, entries[1:3])  # positions 1, 2
    assert state.needs_whole_prompt
    collect_prompt_logprobs(state, 0, entries[1:3])
    collect_prompt_logprobs(state, 2, entries[3:6])  # 3, 4 and one beyond the prompt
    assert not state.needs_whole_prompt
    (output,) = ended_outputs([state], 1.0)
    assert output.prompt_logprobs == [None, *entries[1:5]]
    assert ended_outputs([state], 1.0)[0].prompt_logprobs is None  # given once
    collect_prompt_logprobs(state_of(), 0, entries)  # nobody asked: nothing is kept


def test_outputs_carry_figures_and_aligned_logprobs() -> None:
    state = state_of(logprobs=1)
    state.num_cached, state.queued_s, state.num_preemptions = 2, 0.5, 1
    state.request.arrival_s = 1.0
    append_tokens(state, [5, EOS])
    result = StepResult.__new__(StepResult)
    result.logprobs = {4: [TokenLogprob(t, -1.0, 1) for t in (5, EOS, 7)]}
    silent = state_of()
    outputs = build_outputs([(silent, 3, []), (state, 4, [5, EOS])], result, now_s=4.0)
    (output,) = outputs  # a prefill chunk says nothing
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == [5, EOS]
    assert output.finish_reason is FinishReason.STOP
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (3, 2)
    assert (output.num_output_tokens, output.num_preemptions) == (2, 1)
    assert (output.queued_s, output.first_token_s, output.now_s) == (0.5, 3.0, 4.0)


def test_logprobs_through_the_engine() -> None:
    rig = Rig(max_num_batched_tokens=4)
    prompt = list(range(1, 12))
    rig.add("warm", prompt, max_tokens=1)
    rig.run()
    rig.add("a", prompt, max_tokens=3, logprobs=0, prompt_logprobs=0)
    rig.run()
    outputs = [o for o in rig.outputs if o.request_id == "a"]
    assert all(o.logprobs is not None and len(o.logprobs) == len(o.token_ids) for o in outputs)
    found = outputs[0].prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert [e.token_id for e in found[1:] if e] == prompt[1:]
    assert all(o.prompt_logprobs is None for o in outputs[1:])
    assert outputs[0].num_cached_tokens == 0  # reading the cache would skip their logits
    assert token_logprob(0, 1).rank == 1


def test_scoring_only() -> None:
    """max_tokens = 0: the prompt is computed and scored, nothing is sampled."""
    rig = Rig(max_num_batched_tokens=4, in_flight=2)
    rig.add("a", 9, max_tokens=0, prompt_logprobs=0)
    rig.add("one", 1, max_tokens=0, prompt_logprobs=0)
    assert rig.run() == {"a": [], "one": []}
    assert rig.endings() == {"a": "length", "one": "length"}
    by_name = {o.request_id: o.prompt_logprobs for o in rig.outputs}
    assert by_name["one"] == [None]
    assert by_name["a"] is not None
    assert None not in by_name["a"][1:]
    assert not any(p.samples.any() for p in rig.plans)
