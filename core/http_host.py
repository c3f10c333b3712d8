"""The HTTP side of the host: one table of routes from all frontends, and what guards them.

A plain ASGI application. It finds the route, checks the key (every route needs one unless it is
declared public), reads the body within its limit, counts, and hands over to the frontend's
handler. It knows no protocol beyond the shape of its own errors. Imports no web framework.

Source: ASGI 3.0 specification; OpenAI API reference (error object).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import time
from asyncio import timeout
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from cardcage.core.contracts import Route
from cardcage.core.errors import ConfigError
from cardcage.core.metrics import HttpMetrics

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeout",
    413: "PayloadTooLarge",
    415: "UnsupportedMediaType",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_BODY_IDLE_S = 30.0  # longest silence while a body arrives
_MAX_HEADERS = 256
_DISCARD_S = 5.0  # longest time that a refused body is read on, for its client to see why
_DISCARD_BODIES = 16  # and how much of it, in largest bodies


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The error object that every failing answer carries; messages are cut at 1000 characters."""
    if len(message) > 1000:
        message = message[:997] + "..."
    kind = ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


async def send_error(
    send: Send,
    status: int,
    message: str,
    param: str | None = None,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with an error object."""
    body = error_body(status, message, param)
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": body})


class RouteTable:
    """Routes by method and path. `{name}` matches one segment, and a last one `{name:path}` more.

    Raises:
        ConfigError: two frontends claim one method and path.
    """

    def __init__(self, routes: Iterable[tuple[str, Route]]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[tuple[str, ...], dict[str, Route]]] = []
        owners: dict[tuple[str, str], str] = {}
        shapes: dict[tuple[str, ...], dict[str, Route]] = {}
        for owner, route in routes:
            segments = tuple(
                ("{*}" if s.endswith(":path}") else "{}") if s.startswith("{") else s
                for s in route.path.split("/")
            )
            key = (route.method, "/".join(segments))
            if key in owners:
                raise ConfigError(
                    f"frontends {owners[key]!r} and {owner!r} both serve {route.method} "
                    f"{route.path}: leave one of them out of server.frontends"
                )
            owners[key] = owner
            if any(s in ("{}", "{*}") for s in segments):
                if segments not in shapes:
                    shapes[segments] = {}
                    self._patterns.append((segments, shapes[segments]))
                shapes[segments][route.method] = route
            else:
                self._exact.setdefault(route.path, {})[route.method] = route

    def find(self, path: str) -> dict[str, Route] | None:
        """Routes of a path by method; None when nobody serves it."""
        found = self._exact.get(path)
        if found is not None:
            return found
        parts = path.split("/")
        for segments, routes in self._patterns:
            if _matches(segments, parts):
                return routes
        return None

    def __iter__(self) -> Iterator[Route]:
        for methods in [*self._exact.values(), *(m for _, m in self._patterns)]:
            yield from methods.values()


def _matches(segments: Sequence[str], parts: Sequence[str]) -> bool:
    if segments[-1] == "{*}":
        if len(parts) < len(segments) or not parts[-1]:
            return False
        return all(s in (p, "{}") for s, p in zip(segments[:-1], parts))
    if len(segments) != len(parts):
        return False
    return all(s == p or (s == "{}" and p) for s, p in zip(segments, parts))


class KeyRing:
    """API keys as digests. `check` compares with every key, in constant time for each."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether `Authorization: Bearer KEY` or `x-api-key: KEY` holds an accepted key."""
        good = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name == b"x-api-key":
                key = value
            else:
                continue
            digest = hashlib.sha256(key.strip()).digest()
            for known in self._digests:
                good |= hmac.compare_digest(digest, known)
        return good


class HttpHost:
    """The ASGI application that a server runs.

    Args:
        routes: (frontend's name, route) pairs.
        api_keys: accepted keys; none means that every route is open.
        max_body_bytes: a longer body is refused with 413, also when its length is not declared.
        access_log: log one line per request.
    """

    def __init__(
        self,
        routes: Iterable[tuple[str, Route]],
        *,
        api_keys: Iterable[str] = (),
        max_body_bytes: int = 64 << 20,
        access_log: bool = False,
    ) -> None:
        self.table = RouteTable(routes)
        self.metrics = HttpMetrics()
        self._keys = KeyRing(api_keys)
        self._max_body = max_body_bytes
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        start = time.monotonic()
        status = 0
        begun = False

        async def counted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
            await send(message)

        method = scope["method"]
        routes = self.table.find(scope["path"])
        route = _pick(routes, method) if routes is not None else None
        handler = route.path if route is not None else "unknown"
        self.metrics.in_progress.inc()
        try:
            await self._answer(scope, receive, counted, routes, route)
        except Exception:
            logger.exception("%s %s failed", method, handler)
            if not begun:
                await send_error(counted, 500, "the server failed on this request; see its log")
        finally:
            seconds = time.monotonic() - start
            self.metrics.in_progress.dec()
            known = method if route is not None else "other"
            self.metrics.requests.labels(known, str(status or 499), handler).inc()
            self.metrics.duration.labels(known, handler).observe(seconds)
            if self.access_log:
                logger.info("%s %s %s %.3fs", method, scope["path"], status or 499, seconds)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        routes: dict[str, Route] | None,
        route: Route | None,
    ) -> None:
        public = route is not None and route.auth == "public"
        if self._keys and not public and not self._keys.check(scope["headers"]):
            message = "this server needs an API key: send Authorization: Bearer KEY"
            await send_error(send, 401, message, headers=[(b"www-authenticate", b"Bearer")])
            return
        if routes is None:
            await send_error(send, 404, f"there is no route {scope['path'][:200]}")
            return
        if route is None:
            allowed = ", ".join(sorted(routes))
            message = f"{scope['method'][:20]} is not allowed here; allowed: {allowed}"
            await send_error(send, 405, message, headers=[(b"allow", allowed.encode())])
            return
        if len(scope["headers"]) > _MAX_HEADERS:
            await send_error(send, 400, f"more than {_MAX_HEADERS} headers")
            return
        body = await self._read_body(scope, receive, send)
        if body is not None:
            await route.handler(scope, _replay(body, receive), send)

    async def _read_body(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """The whole body; None when it was refused or the client left."""
        too_large = f"the body is larger than {self._max_body} bytes (server.max_body_bytes)"
        close = [(b"connection", b"close")]
        waits = False
        refused = False
        for name, value in scope["headers"]:
            waits = waits or name == b"expect"
            if name == b"content-length":
                refused = not value.isdigit() or int(value[:20]) > self._max_body
        chunks: list[bytes] = []
        size = 0
        more = True
        while more and not refused:
            try:
                async with timeout(_BODY_IDLE_S):
                    message = await receive()
            except TimeoutError:
                await send_error(send, 408, f"no body arrived for {_BODY_IDLE_S:.0f} s")
                return None
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            refused = size > self._max_body
            chunks.append(chunk)
            more = message.get("more_body", False)
        if refused:
            chunks.clear()
            if more and not waits:
                await _discard(receive, _DISCARD_BODIES * self._max_body)
            await send_error(send, 413, too_large, headers=close)
            return None
        return b"".join(chunks)


async def _discard(receive: Receive, most: int) -> None:
    """Read on for a while: a client that still sends would see a reset and not the answer."""
    with contextlib.suppress(TimeoutError):
        async with timeout(_DISCARD_S):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _pick(routes: dict[str, Route], method: str) -> Route | None:
    found = routes.get(method)
    return routes.get("GET") if found is None and method == "HEAD" else found


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then whatever the connection says."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
