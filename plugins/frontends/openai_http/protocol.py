"""Request bodies of the API, and how their fields become sampling parameters.

Types are checked strictly (no number from a string, no integer from a boolean); ranges are
checked by `SamplingParams`, once, for every frontend. A field that is known but cannot be
honoured is refused by name; a field that nobody knows is counted and logged.

Source: OpenAI API reference; additional fields of vLLM 0.30.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cardcage.plugins.frontends.openai_http.errors import ApiError, from_validation

Json = dict[str, Any]


class Body(BaseModel):
    """Base of all bodies: strict types; `parse_body` judges fields that are not declared."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """Fields that chat and completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = None


class TokenizeBody(Body):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# Fields once known under another name.
RENAMED = {
    "best_of": "n",
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_choice": "structured_outputs",
    "guided_decoding_backend": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
}
# Fields that we know and cannot honour, with the values that ask for nothing.
_TEXT = {"type": "text"}
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": (),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "ext": ({},),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "response_format": (_TEXT,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "tools": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
_WHY = {
    "chat_template": "templates sent by clients are not run",
    "response_format": "structured output is not supported yet; only type text is",
    "structured_outputs": "structured output is not supported yet",
    "tools": "tool calling is not supported yet",
}
# Known, without effect on the answer: who asks, or a mark that only matters with a watermark.
HARMLESS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "watermarking"}
)

B = TypeVar("B", bound=Body)


def parse_json(raw: bytes, content_type: str | None, max_depth: int) -> Json:
    """A JSON object from a request body. Raises ApiError for anything else."""
    kind = (content_type or "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the content type must be application/json, got {kind[:100] or 'none'}"
        )
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got a {type(value).__name__}")
    _check_depth(value, max_depth)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any, limit: int) -> None:
    level: list[Any] = [value]
    for _ in range(limit):
        deeper: list[Any] = []
        for item in level:
            inner = item.values() if isinstance(item, dict) else item
            deeper += [x for x in inner if isinstance(x, (dict, list))]
        if not deeper:
            return
        level = deeper
    raise ApiError(400, f"the body is nested deeper than {limit} levels")


def parse_body(
    model: type[B], data: Json, strict_fields: bool, on_unknown: Callable[[str], None]
) -> B:
    """The typed body.

    Args:
        on_unknown: told each field that nobody knows, unless `strict_fields` refuses them.

    Raises:
        ApiError: wrong types, or a field that is renamed, refused, or (strict) unknown.
    """
    data = {k: v for k, v in data.items() if v is not None}  # null means: not given
    known = model.model_fields
    for name in data:
        if name in known or name in HARMLESS:
            continue
        if name in RENAMED:
            raise ApiError(400, f"{name} is not supported; use {RENAMED[name]}", name)
        if name in REFUSED:
            if not any(_same(data[name], neutral) for neutral in REFUSED[name]):
                why = _WHY.get(name, f"{name} is not supported")
                raise ApiError(400, f"{why}: leave {name} out", name)
        elif strict_fields:
            raise ApiError(400, f"unknown field {name[:100]!r}", name[:100])
        else:
            on_unknown(name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) is not isinstance(neutral, bool):
        return False
    return bool(value == neutral)


_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


def sampling_fields(body: GenerationBody) -> Json:
    """The sampling parameters that the client set, as `SamplingParams` spells them."""
    fields = {name: getattr(body, name) for name in _DIRECT if getattr(body, name) is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if body.logit_bias is not None:
        try:
            fields["logit_bias"] = {int(k): v for k, v in body.logit_bias.items()}
        except ValueError:
            raise ApiError(400, "logit_bias must map token ids to numbers", "logit_bias") from None
    return fields


def check_limits(body: GenerationBody, max_n: int, max_stop: int) -> None:
    """Rules of the API itself, beside the ranges of `SamplingParams`."""
    if body.n is not None and body.n > max_n:
        raise ApiError(400, f"n must be at most {max_n}, got {body.n}", "n")
    if isinstance(body.stop, list) and len(body.stop) > max_stop:
        raise ApiError(400, f"stop must have at most {max_stop} strings", "stop")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", "prompt_logprobs")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise ApiError(400, "continuous_usage_stats needs include_usage=true", "stream_options")
