"""What chat and completions have in common: identity, admission, usage, the answering loop."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from cardcage.core.contracts import EngineClient, GenStream
from cardcage.core.types import TextDelta, TokenLogprob, Usage
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions
from cardcage.plugins.frontends.openai_http.errors import ApiError
from cardcage.plugins.frontends.openai_http.protocol import GenerationBody, Json

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
MAX_SESSION = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an answer is: its id (unique even if the client repeats its own), time and model."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    client_id: str | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.client_id is None:
            return []
        return [(b"x-request-id", self.client_id.encode())]


def identify(request: Request, prefix: str, model: str, options: OpenAIHttpOptions) -> Identity:
    """The identity of one answer. A client's X-Request-Id becomes part of the id."""
    given = request.headers.get("x-request-id")
    unique = secrets.token_hex(12)
    client_id = None
    if given:
        client_id = _UNSAFE.sub("_", given)[:128]
        unique = f"{client_id}-{unique[:8]}"
    return Identity(
        f"{prefix}-{unique}",
        int(time.time()),
        model,
        options.system_fingerprint,
        client_id if options.request_id_header else None,
    )


def served_model(client: EngineClient, asked: str | None) -> str:
    """The name to answer with. Raises ApiError 404 for a model that is not served."""
    names = client.info.served_names
    if asked is not None and asked not in names:
        raise ApiError(404, f"The model `{asked[:200]}` does not exist.", "model")
    return str(names[0])


def priority(request: Request, body: GenerationBody, options: OpenAIHttpOptions) -> int:
    """The header's priority, else the body's."""
    header = options.priority_header and request.headers.get(options.priority_header)
    if header:
        try:
            return int(header)
        except ValueError:
            name = options.priority_header
            raise ApiError(400, f"header {name} must be an integer, got {header[:50]!r}") from None
    if body.priority is not None and not options.trust_body_priority:
        raise ApiError(400, "this server takes no priority from clients", "priority")
    return body.priority or 0


def session(request: Request, body: GenerationBody) -> str | None:
    """The session id of the body or the X-Session-ID header."""
    value = body.session_id or request.headers.get("x-session-id")
    if value is not None and len(value) > MAX_SESSION:
        raise ApiError(400, f"session_id must have at most {MAX_SESSION} characters", "session_id")
    return value


def usage_object(usages: Sequence[Usage], details: bool) -> Json:
    """The sum over prompts."""
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    out: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if details:
        out["prompt_tokens_details"] = {"cached_tokens": sum(u.cached_tokens for u in usages)}
    return out


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is not streamed, as it grows."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(stream: GenStream, count: int) -> list[Choice]:
    """All of a stream. A sample that was aborted from elsewhere ends with "abort"."""
    choices = [Choice() for _ in range(count)]
    async for delta in stream:
        choices[delta.index].add(delta)
    for choice in choices:
        choice.text = "".join(choice.texts)
        choice.finish_reason = choice.finish_reason or "abort"
    return choices


class TokenNames:
    """How tokens are written in logprobs: as text, or as `token_id:N` when the client asks."""

    def __init__(self, client: EngineClient, as_ids: bool) -> None:
        self._client = client
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        text, data = self._client.token_text(token_id)
        return (f"token_id:{token_id}" if self._as_ids else text), list(data)


def floor(value: float) -> float:
    """JSON has no -inf."""
    return value if value > -9999.0 else -9999.0


def prompt_logprobs_object(
    entries: Sequence[TokenLogprob | None] | None, names: TokenNames
) -> list[Mapping[str, Any] | None] | None:
    """Per prompt position: token id -> {logprob, rank, decoded_token}; the first is null."""
    if entries is None:
        return None
    out: list[Mapping[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        row: Json = {}
        pairs = [(entry.token_id, entry.logprob, entry.rank)]
        pairs += [(t, v, rank) for rank, (t, v) in enumerate(entry.top, 1)]
        for token_id, value, rank in pairs:
            if str(token_id) not in row:
                row[str(token_id)] = {
                    "logprob": floor(value),
                    "rank": rank,
                    "decoded_token": names(token_id)[0],
                }
        out.append(row)
    return out
