"""Stop rules and token outputs: from committed rows to what clients are told.

`append_tokens` decides which sampled tokens a request keeps and whether it ends; the scheduler
calls it while it commits a step. `build_outputs` turns the committed rows into `TokenOutput`s.
Stop *strings* belong to the text layer, which aborts the request. Ids only here, no text.

Source: spec/scheduler.md 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cardcage.core.request_state import RequestState
from cardcage.core.types import (
    FinishReason,
    Request,
    StepResult,
    TokenLogprob,
    TokenOutput,
)

# One row of a finished step that still belonged to its request: (request, row of the plan, the
# tokens that the request kept). A plain tuple: there is one per running request and step.
Committed = tuple[RequestState, int, list[int]]


def stop_tokens(request: Request) -> frozenset[int]:
    """Every token that may end the request: end of sequence (unless ignored) and its own list."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return frozenset(eos) | frozenset(request.params.stop_token_ids)


def append_token(state: RequestState, token: int) -> bool:
    """Append one sampled token; True when it ends the request (reason set on the state).

    Order: end of sequence, stop_token_ids (stop_reason = the id), then length. A stop token
    counts only once `min_tokens` outputs exist; the sampler masks it until then.
    """
    state.tokens.append(token)
    params = state.request.params
    if token in state.stops and state.num_outputs >= params.min_tokens:
        state.finish_reason = FinishReason.STOP
        is_eos = not params.ignore_eos and token in state.request.eos_token_ids
        state.stop_reason = None if is_eos else token
        return True
    if len(state.tokens) >= state.max_len:
        state.finish_reason = FinishReason.LENGTH
        return True
    return False


def append_tokens(state: RequestState, tokens: Sequence[int]) -> int:
    """Append until the request ends; returns how many were kept. The rest is dropped."""
    for kept, token in enumerate(tokens, 1):
        if append_token(state, token):
            return kept
    return len(tokens)


def collect_prompt_logprobs(
    state: RequestState, start: int, entries: Iterable[TokenLogprob]
) -> None:
    """Store what a prefill chunk said about the prompt positions start + 1, start + 2, ...

    Entry 0 stays None: nothing predicts the first token. A chunk computed again after a
    preemption overwrites the same positions.
    """
    found = state.prompt_logprobs
    if found is None:
        return
    position = start
    for entry in entries:
        position += 1
        if position < state.prompt_len:
            found[position] = entry
    state.num_prompt_logprobs = max(state.num_prompt_logprobs, min(position, state.prompt_len - 1))


def build_outputs(
    committed: Sequence[Committed], result: StepResult, now_s: float
) -> list[TokenOutput]:
    """One `TokenOutput` per row that brought tokens or ended its request, in row order."""
    outputs = []
    logprobs = result.logprobs
    for state, row, tokens in committed:
        if not tokens and state.finish_reason is None:
            continue
        if state.first_token_s is None and tokens:
            state.first_token_s = now_s - state.request.arrival_s
        output = token_output(state, tokens, now_s)
        if logprobs and row in logprobs:
            output.logprobs = logprobs[row][: len(tokens)]
        outputs.append(output)
    return outputs


def ended_outputs(states: Iterable[RequestState], now_s: float) -> list[TokenOutput]:
    """The terminal outputs of requests that ended outside a step (abort, failure, deadline)."""
    return [token_output(state, [], now_s) for state in states]


def token_output(state: RequestState, tokens: list[int], now_s: float) -> TokenOutput:
    """The output for `tokens` just appended. Prompt logprobs ride on the first one."""
    output = TokenOutput(
        state.request.request_id,
        tokens,
        None,
        None,
        state.finish_reason,
        state.stop_reason,
        state.error,
        state.prompt_len,
        state.num_cached or 0,
        len(state.tokens) - state.prompt_len,
        state.num_preemptions,
        state.queued_s,
        state.first_token_s,
        now_s,
    )
    if state.prompt_logprobs is not None and not state.needs_whole_prompt:
        output.prompt_logprobs = state.prompt_logprobs
        state.prompt_logprobs = None
    return output
