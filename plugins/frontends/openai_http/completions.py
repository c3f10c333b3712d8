"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from cardcage.core.contracts import EngineClient, GenStream
from cardcage.core.types import GenRequest, TextDelta, TokenLogprob
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions
from cardcage.plugins.frontends.openai_http import generate as g
from cardcage.plugins.frontends.openai_http.errors import ApiError
from cardcage.plugins.frontends.openai_http.protocol import (
    CompletionBody,
    Json,
    check_limits,
    sampling_fields,
)
from cardcage.plugins.frontends.openai_http.sse import EventStream, Watch, dumps, event, merged

DEFAULT_MAX_TOKENS = 16


def prompts_of(value: Any, most: int) -> list[str | list[int]]:
    """The prompts of a body: a string, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ApiError(400, "prompt must be a string, token ids, or a list of these", "prompt")
    if not value:
        raise ApiError(400, "prompt must not be empty", "prompt")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > most:
        raise ApiError(400, f"prompt must hold at most {most} prompts, got {len(value)}", "prompt")
    for i, item in enumerate(value):
        good = isinstance(item, str) or (
            isinstance(item, list) and bool(item) and all(type(x) is int for x in item)
        )
        if not good or type(item) is not type(value[0]):
            what = f"prompt.{i} must be a non-empty string or list of token ids, like the others"
            raise ApiError(400, what, f"prompt.{i}")
    return value


def to_requests(
    body: CompletionBody, request: Request, request_id: str, options: OpenAIHttpOptions
) -> list[GenRequest]:
    """One internal request per prompt."""
    check_limits(body, options.max_n, options.max_stop)
    fields = sampling_fields(body)
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            asked = (body.logprobs, body.prompt_logprobs or 0)
            fields["prompt_logprobs"] = -1 if -1 in asked else max(asked)
    if fields.get("max_tokens") == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens must be at least 1 (0 needs echo=true)", "max_tokens")
    prompts = prompts_of(body.prompt, options.max_prompts)
    return [
        GenRequest(
            request_id=f"{request_id}-{i}" if len(prompts) > 1 else request_id,
            prompt=prompt,
            params=fields,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            add_special_tokens=body.add_special_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
            priority=g.priority(request, body, options),
            cache_salt=body.cache_salt,
            session_id=g.session(request, body),
        )
        for i, prompt in enumerate(prompts)
    ]


async def completions(
    body: CompletionBody, request: Request, client: EngineClient, options: OpenAIHttpOptions
) -> Any:
    """Complete one or more prompts, streamed or at once. All are checked before any starts."""
    who = g.identify(request, "cmpl", g.served_model(client, body.model), options)
    prepared = [await client.prepare(r) for r in to_requests(body, request, who.id, options)]
    streams: list[GenStream] = []
    try:
        for one in prepared:
            streams.append(await client.start_stream(one))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    answer = _Answer(body, who, client, streams, options)
    if body.stream:
        return EventStream(
            answer.events(),
            streams,
            who.id,
            headers=who.headers,
            keep_alive_s=options.sse_keep_alive_s,
            write_timeout_s=options.write_timeout_s,
        )
    async with Watch(request.receive, streams) as watch:
        choices = [await g.collect(stream, answer.n) for stream in streams]
        if watch.gone:
            return Response(status_code=499)
    return Response(
        dumps(answer.whole(choices)),
        media_type="application/json",
        headers={k.decode(): v.decode() for k, v in who.headers},
    )


class _Answer:
    """Builds one answer's objects."""

    def __init__(
        self,
        body: CompletionBody,
        who: g.Identity,
        client: EngineClient,
        streams: list[GenStream],
        options: OpenAIHttpOptions,
    ) -> None:
        self.body, self.who, self.streams, self.options = body, who, streams, options
        self.client = client
        self.n = streams[0].params.n
        self.names = g.TokenNames(client, bool(body.return_tokens_as_token_ids))
        wanted = body.stream_options
        self.include_usage = options.force_include_usage or bool(wanted and wanted.include_usage)
        self.running_usage = options.force_include_usage or bool(
            wanted and wanted.continuous_usage_stats
        )
        self._echo_texts: dict[int, str] = {}

    def usage(self) -> Json:
        return g.usage_object(
            [stream.usage for stream in self.streams], self.options.prompt_tokens_details
        )

    def echo_text(self, at: int) -> str:
        """The prompt's own text ("" without echo)."""
        if not self.body.echo:
            return ""
        if at not in self._echo_texts:
            stream = self.streams[at]
            text = stream.prompt_text
            if text is None and self.client.tokenizer is not None:
                text = self.client.tokenizer.decode(list(stream.prompt_token_ids), True)
            self._echo_texts[at] = text or ""
        return self._echo_texts[at]

    def base(self, choices: list[Json]) -> Json:
        return {
            "id": self.who.id,
            "object": "text_completion",
            "created": self.who.created,
            "model": self.who.model,
            "choices": choices,
            "system_fingerprint": self.who.fingerprint,
        }

    def whole(self, per_prompt: list[list[g.Choice]]) -> Json:
        out = []
        for at, choices in enumerate(per_prompt):
            for index, choice in enumerate(choices):
                logprobs = None
                if self.body.logprobs is not None:
                    logprobs = _Legacy(self, len(self.echo_text(at)))
                    logprobs.add_prompt(at)
                    logprobs.add(choice.logprobs, choice.offsets)
                item: Json = {
                    "index": at * self.n + index,
                    "text": self.echo_text(at) + choice.text,
                    "logprobs": logprobs.object() if logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                if self.body.prompt_logprobs is not None:
                    scored = self.streams[at].prompt_logprobs
                    item["prompt_logprobs"] = g.prompt_logprobs_object(scored, self.names)
                if self.body.return_token_ids:
                    item["token_ids"] = choice.token_ids
                    item["prompt_token_ids"] = list(self.streams[at].prompt_token_ids)
                out.append(item)
        return {**self.base(out), "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        started: set[int] = set()
        async for at, delta in merged(self.streams):
            index = at * self.n + delta.index
            chunk = self.delta_chunk(at, index, delta, first=index not in started)
            started.add(index)
            if chunk is not None:
                yield chunk
        if self.include_usage:
            last = self.base([])
            last["usage"] = self.usage()
            yield event(last)

    def delta_chunk(self, at: int, index: int, delta: TextDelta, first: bool) -> bytes | None:
        body = self.body
        text = (self.echo_text(at) if first else "") + delta.text
        wants_tokens = body.logprobs is not None or bool(body.return_token_ids)
        if not text and delta.finish_reason is None and not wants_tokens:
            return None
        logprobs = None
        if body.logprobs is not None:
            legacy = _Legacy(self, len(self.echo_text(at)))
            if first:
                legacy.add_prompt(at)
            legacy.add(delta.logprobs, delta.offsets)
            logprobs = legacy.object()
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = list(self.streams[at].prompt_token_ids)
        chunk = self.base([choice])
        if self.running_usage:
            chunk["usage"] = self.usage()
        elif self.include_usage:
            chunk["usage"] = None
        return event(chunk)


class _Legacy:
    """The logprobs object of completions: four parallel lists.

    Args:
        shift: characters of the choice's text before the generated part.
    """

    def __init__(self, answer: _Answer, shift: int) -> None:
        self._answer, self._shift = answer, shift
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_prompt(self, at: int) -> None:
        """The echoed prompt's tokens; nothing predicts the first one."""
        answer = self._answer
        scored = answer.streams[at].prompt_logprobs
        if not answer.body.echo or scored is None:
            return
        ids = answer.streams[at].prompt_token_ids
        offsets = answer.client.token_offsets(ids)
        for token_id, entry, offset in zip(ids, scored, offsets):
            if entry is None:
                self._put(answer.names(token_id)[0], None, None, offset)
            else:
                self._entry(entry, offset)

    def add(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> None:
        """Generated tokens."""
        for entry, offset in zip(logprobs, offsets):
            self._entry(entry, self._shift + offset)

    def _entry(self, entry: TokenLogprob, offset: int) -> None:
        names = self._answer.names
        token = names(entry.token_id)[0]
        wanted = self._answer.body.logprobs
        shown = entry.top if wanted == -1 else entry.top[:wanted]
        top = {names(t)[0]: g.floor(v) for t, v in shown}
        top.setdefault(token, g.floor(entry.logprob))
        self._put(token, g.floor(entry.logprob), top, offset)

    def _put(
        self, token: str, value: float | None, top: dict[str, float] | None, offset: int
    ) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(value)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def object(self) -> Json:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
