"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from cardcage.core.contracts import EngineClient, GenStream
from cardcage.core.errors import RequestError
from cardcage.core.types import GenRequest, TextDelta, TokenLogprob
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions
from cardcage.plugins.frontends.openai_http import generate as g
from cardcage.plugins.frontends.openai_http.errors import ApiError
from cardcage.plugins.frontends.openai_http.protocol import (
    ChatBody,
    Json,
    check_limits,
    sampling_fields,
)
from cardcage.plugins.frontends.openai_http.sse import EventStream, Watch, dumps, event


def to_request(
    body: ChatBody, request: Request, request_id: str, options: OpenAIHttpOptions
) -> GenRequest:
    """The internal request for a chat body."""
    check_limits(body, options.max_n, options.max_stop)
    fields = sampling_fields(body)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    if fields.get("max_tokens") == 0:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise ApiError(400, f"{name} must be at least 1", name)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    return GenRequest(
        request_id=request_id,
        messages=body.messages,
        params=fields,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=not continues if generation_prompt is None else generation_prompt,
        continue_final_message=continues,
        priority=g.priority(request, body, options),
        cache_salt=body.cache_salt,
        session_id=g.session(request, body),
    )


async def chat_completions(
    body: ChatBody, request: Request, client: EngineClient, options: OpenAIHttpOptions
) -> Any:
    """Answer a chat, streamed or at once."""
    who = g.identify(request, "chatcmpl", g.served_model(client, body.model), options)
    try:
        stream = await client.submit(to_request(body, request, who.id, options))
    except RequestError as error:
        raise _named(error, body) from error
    answer = _Answer(body, who, client, stream, options)
    if body.stream:
        return EventStream(
            answer.events(),
            [stream],
            who.id,
            headers=who.headers,
            keep_alive_s=options.sse_keep_alive_s,
            write_timeout_s=options.write_timeout_s,
        )
    async with Watch(request.receive, [stream]) as watch:
        choices = await g.collect(stream, stream.params.n)
        if watch.gone:
            return Response(status_code=499)
    return Response(
        dumps(answer.whole(choices)),
        media_type="application/json",
        headers={k.decode(): v.decode() for k, v in who.headers},
    )


def _named(error: RequestError, body: ChatBody) -> RequestError:
    """The error with the field's name as this API spells it."""
    if error.param == "logprobs":
        error.param = "top_logprobs"
    elif error.param == "max_tokens" and body.max_completion_tokens is not None:
        error.param = "max_completion_tokens"
    return error


class _Answer:
    """Builds one answer's objects."""

    def __init__(
        self,
        body: ChatBody,
        who: g.Identity,
        client: EngineClient,
        stream: GenStream,
        options: OpenAIHttpOptions,
    ) -> None:
        self.body, self.who, self.stream, self.options = body, who, stream, options
        self.names = g.TokenNames(client, bool(body.return_tokens_as_token_ids))
        self.prefix = ""
        if body.echo and body.messages[-1]["role"] == "assistant":
            content = body.messages[-1].get("content")
            self.prefix = content if isinstance(content, str) else ""
        wanted = body.stream_options
        self.include_usage = options.force_include_usage or bool(wanted and wanted.include_usage)
        self.running_usage = options.force_include_usage or bool(
            wanted and wanted.continuous_usage_stats
        )

    def usage(self) -> Json:
        return g.usage_object([self.stream.usage], self.options.prompt_tokens_details)

    def whole(self, choices: list[g.Choice]) -> Json:
        body, out = self.body, []
        for index, choice in enumerate(choices):
            message = {
                "role": "assistant",
                "content": self.prefix + choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
            }
            item: Json = {
                "index": index,
                "message": message,
                "logprobs": {"content": self.content(choice.logprobs)} if body.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if body.return_token_ids:
                item["token_ids"] = choice.token_ids
            out.append(item)
        whole: Json = {
            "id": self.who.id,
            "object": "chat.completion",
            "created": self.who.created,
            "model": self.who.model,
            "choices": out,
            "usage": self.usage(),
            "service_tier": None,
            "system_fingerprint": self.who.fingerprint,
        }
        if body.prompt_logprobs is not None:
            scored = self.stream.prompt_logprobs
            whole["prompt_logprobs"] = g.prompt_logprobs_object(scored, self.names)
        if body.return_token_ids:
            whole["prompt_token_ids"] = list(self.stream.prompt_token_ids)
        return whole

    def content(self, logprobs: list[TokenLogprob]) -> list[Json]:
        """The `logprobs.content` list."""
        out = []
        for entry in logprobs:
            text, data = self.names(entry.token_id)
            top = []
            for token_id, value in entry.top:
                top_text, top_data = self.names(token_id)
                top.append({"token": top_text, "logprob": g.floor(value), "bytes": top_data})
            out.append(
                {
                    "token": text,
                    "logprob": g.floor(entry.logprob),
                    "bytes": data,
                    "top_logprobs": top,
                }
            )
        return out

    def chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self.who.id,
            "object": "chat.completion.chunk",
            "created": self.who.created,
            "model": self.who.model,
            "system_fingerprint": self.who.fingerprint,
            "choices": choices,
        }
        if self.running_usage:
            chunk["usage"] = self.usage()
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def first(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        chunk = self.chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        )
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = list(self.stream.prompt_token_ids)
        return event(chunk)

    async def events(self) -> AsyncIterator[bytes]:
        for index in range(self.stream.params.n):
            yield self.first(index)
            if self.prefix:
                yield event(self.chunk([_choice(index, {"content": self.prefix})]))
        plain = not (self.body.logprobs or self.body.return_token_ids or self.running_usage)
        frames: dict[int, tuple[bytes, bytes]] = {}
        async for delta in self.stream:
            if plain and delta.finish_reason is None:
                if delta.text:
                    head, tail = frames.get(delta.index) or self._frame(frames, delta.index)
                    yield head + dumps(delta.text) + tail
                continue
            chunk = self.delta_chunk(delta)
            if chunk is not None:
                yield chunk
        if self.include_usage:
            last = self.chunk([])
            last["usage"] = self.usage()
            yield event(last)

    def _frame(self, frames: dict[int, tuple[bytes, bytes]], index: int) -> tuple[bytes, bytes]:
        """The bytes around a plain text delta; only the text differs from chunk to chunk."""
        mark = "\u0001text\u0001"
        whole = event(self.chunk([_choice(index, {"content": mark})]))
        head, _, tail = whole.partition(dumps(mark))
        frames[index] = head, tail
        return head, tail

    def delta_chunk(self, delta: TextDelta) -> bytes | None:
        body = self.body
        shows_tokens = bool(body.logprobs and delta.logprobs) or bool(body.return_token_ids)
        if not delta.text and delta.finish_reason is None and not shows_tokens:
            return None
        choice = _choice(delta.index, {"content": delta.text} if delta.text else {})
        if body.logprobs:
            choice["logprobs"] = {"content": self.content(delta.logprobs)}
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return event(self.chunk([choice]))


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
