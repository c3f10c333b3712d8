"""The FastAPI application behind the routes, and the small routes themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cardcage import __version__
from cardcage.core.contracts import EngineClient, Route
from cardcage.core.types import GenRequest
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions
from cardcage.plugins.frontends.openai_http.chat import chat_completions
from cardcage.plugins.frontends.openai_http.completions import completions
from cardcage.plugins.frontends.openai_http.errors import ApiError, error_response, to_api_error
from cardcage.plugins.frontends.openai_http.generate import served_model
from cardcage.plugins.frontends.openai_http.protocol import (
    B,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    parse_json,
)

_MAX_FIELD_LABELS = 50  # distinct unknown fields that get a label of their own
_INLINE_BYTES = 1 << 17  # larger bodies are parsed in a thread
_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
_PUBLIC = frozenset({"/health", "/ping", "/version"})


class OpenAIFrontend:
    """The frontend: one FastAPI application whose paths are mounted one by one."""

    def __init__(self, options: OpenAIHttpOptions, logger: logging.Logger) -> None:
        self._options = options
        self._logger = logger
        self._registry = CollectorRegistry()
        self._unknown = Counter(
            "cardcage_unknown_fields",
            "Request fields that nobody knows.",
            ["field"],
            registry=self._registry,
        )
        self._labels: set[str] = set()
        self.load = 0  # generation requests whose answer is not finished

    def routes(self, client: EngineClient) -> list[Route]:
        """Every route, served by one application."""
        self._client = client
        app = FastAPI(title="Cardcage", version=__version__, docs_url=None, redoc_url=None,
                      openapi_url=None)  # fmt: skip
        table: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("POST", "/ping", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.metrics),
            ("GET", "/load", self.get_load),
        ]
        for method, path, endpoint in table:
            app.router.add_route(path, _guarded(endpoint, self._logger), methods=[method])
        app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
        counted = self._counting(app)
        public = _PUBLIC | ({"/metrics"} if self._options.public_metrics else frozenset())
        return [
            Route(
                method,
                path,
                counted if path in _GENERATING else app,
                "public" if path in public else "required",
            )
            for method, path, _ in table
        ]

    def close(self) -> None:
        """Nothing is held open."""

    def _counting(self, app: Any) -> Callable[..., Awaitable[None]]:
        """Counts requests until the last byte of their answer."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.load += 1
            try:
                await app(scope, receive, send)
            finally:
                self.load -= 1

        return counted

    async def _body(self, model: type[B], request: Request) -> B:
        raw, kind = await request.body(), request.headers.get("content-type")
        options, unknown = self._options, list[str]()

        def parse() -> B:
            data = parse_json(raw, kind, options.max_json_depth)
            return parse_body(model, data, options.strict_fields, unknown.append)

        try:
            # A large body takes seconds, in which the others' answers must go on.
            return parse() if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(parse)
        finally:
            for name in unknown:
                self._count_unknown(name)

    def _count_unknown(self, name: str) -> None:
        self._logger.debug("unknown request field %r", name[:100])
        label = name[:64]
        if label not in self._labels:
            if len(self._labels) >= _MAX_FIELD_LABELS or not label.isidentifier():
                label = "other"
            self._labels.add(label)
        self._unknown.labels(label).inc()

    # ---- routes

    async def chat(self, request: Request) -> Any:
        body = await self._body(ChatBody, request)
        return await chat_completions(body, request, self._client, self._options)

    async def completions(self, request: Request) -> Any:
        body = await self._body(CompletionBody, request)
        return await completions(body, request, self._client, self._options)

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._client.info.served_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        served_model(self._client, name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._client.info
        return {
            "id": name,
            "object": "model",
            "created": info.created_s,
            "owned_by": "cardcage",
            "root": info.name,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(TokenizeBody, request)
        served_model(self._client, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", "prompt")
        continues = bool(body.continue_final_message)
        wanted = body.add_generation_prompt
        _, ids = await self._client.render(
            GenRequest(
                prompt=body.prompt,
                messages=body.messages,
                add_special_tokens=body.add_special_tokens,
                template_kwargs=body.chat_template_kwargs or {},
                add_generation_prompt=not continues if wanted is None else wanted,
                continue_final_message=continues,
            )
        )
        strings = [self._client.token_text(i)[0] for i in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._client.info.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(DetokenizeBody, request)
        served_model(self._client, body.model)
        tokenizer, vocab = self._client.tokenizer, self._client.info.vocab_size
        if tokenizer is None:
            raise ApiError(400, "this server runs without a tokenizer")
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise ApiError(400, f"token id {token} is not in [0, {vocab})", "tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
        return JSONResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        state, reason = self._client.health()
        if state == "ok":
            return Response(status_code=200)
        raise ApiError(503, f"{state}: {reason}" if reason else state, retry_after_s=5.0)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        text = await self._client.metrics_text() + generate_latest(self._registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def get_load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.load})


def _guarded(
    endpoint: Callable[[Request], Awaitable[Any]], logger: logging.Logger
) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint whose exceptions become error objects."""

    async def guarded(request: Request) -> Any:
        try:
            return await endpoint(request)
        except Exception as error:
            answer = to_api_error(error)
            if answer.status >= 500 and not isinstance(error, ApiError):
                level = logging.WARNING if answer.status == 503 else logging.ERROR
                logger.log(level, "%s: %s", request.url.path, error, exc_info=level > 30)
            return error_response(answer)

    return guarded


async def _http_error(request: Request, error: HTTPException) -> Response:
    return error_response(ApiError(error.status_code, str(error.detail)))
