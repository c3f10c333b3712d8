"""The route table, the key ring and the guards of the HTTP host."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cardcage.core.contracts import Route
from cardcage.core.errors import ConfigError
from cardcage.core.http_host import HttpHost, KeyRing, RouteTable, error_body


async def hello(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"got " + body})


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("secret detail")


def host(*routes: Route, **options: Any) -> HttpHost:
    return HttpHost([("test", route) for route in routes], **options)


def call(
    app: HttpHost,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    chunks: list[bytes] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []
    parts = list(chunks or [b""])

    async def receive() -> Any:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
    }
    asyncio.run(app(scope, receive, send))
    start = sent[0]
    head = {k.decode(): v.decode() for k, v in start["headers"]}
    return start["status"], head, b"".join(m.get("body", b"") for m in sent[1:])


def test_patterns_and_methods() -> None:
    table = RouteTable(
        [
            ("a", Route("GET", "/v1/models", hello)),
            ("a", Route("GET", "/v1/models/{name:path}", hello)),
            ("a", Route("POST", "/x/{id}/stop", hello)),
            ("b", Route("GET", "/x/{other}/stop", hello)),
        ]
    )
    assert table.find("/v1/models") is not None
    assert table.find("/v1/models/org/name") is not None
    assert table.find("/v1/models/") is None
    assert set(table.find("/x/7/stop") or ()) == {"GET", "POST"}
    assert table.find("/x/stop") is None
    assert len(list(table)) == 4


def test_two_frontends_on_one_route_are_an_error() -> None:
    with pytest.raises(ConfigError, match="'a' and 'b' both serve GET /x"):
        RouteTable([("a", Route("GET", "/x", hello)), ("b", Route("GET", "/x", hello))])
    with pytest.raises(ConfigError, match="both serve"):
        RouteTable([("a", Route("GET", "/x/{a}", hello)), ("b", Route("GET", "/x/{b}", hello))])


def test_keys() -> None:
    ring = KeyRing(["one", "zwei€"])
    assert ring.check([(b"authorization", b"Bearer one")])
    assert ring.check([(b"authorization", b"bearer one")])
    assert ring.check([(b"x-api-key", "zwei€".encode())])
    assert not ring.check([(b"authorization", b"Basic one")])
    assert not ring.check([(b"authorization", b"Bearer on")])
    assert not ring.check([(b"x-api-key", b"")])
    assert not ring.check([])
    assert not KeyRing([])


def test_guards() -> None:
    app = host(
        Route("POST", "/x", hello),
        Route("GET", "/open", hello, "public"),
        api_keys=["k"],
        max_body_bytes=8,
    )
    good = {"authorization": "Bearer k"}
    assert call(app, "POST", "/x", good, [b"ab", b"cd"])[2] == b"got abcd"
    assert call(app, "POST", "/x")[0] == 401
    assert call(app, "GET", "/nothing")[0] == 401
    assert call(app, "GET", "/nothing", good)[0] == 404
    assert call(app, "GET", "/open")[0] == 200
    assert call(app, "HEAD", "/open")[0] == 200
    status, head, _ = call(app, "DELETE", "/x", good)
    assert (status, head["allow"]) == (405, "POST")
    assert call(app, "POST", "/x", {**good, "content-length": "9"}, [b"x" * 9])[0] == 413
    assert call(app, "POST", "/x", {**good, "content-length": "zz"})[0] == 413
    assert call(app, "POST", "/x", good, [b"x" * 5, b"x" * 5])[0] == 413
    many = {**good, **{f"h{i}": "" for i in range(300)}}
    assert call(app, "POST", "/x", many)[0] == 400


def test_a_failing_handler_tells_no_details() -> None:
    status, _, body = call(host(Route("GET", "/b", broken)), "GET", "/b")
    assert status == 500
    assert b"secret" not in body
    assert json.loads(body)["error"]["type"] == "InternalServerError"


def test_metrics_use_the_route_not_the_path() -> None:
    app = host(Route("GET", "/m/{name}", hello))
    call(app, "GET", "/m/a")
    call(app, "GET", "/m/b")
    call(app, "GET", "/../etc/passwd")
    text = app.metrics.text().decode()
    assert 'http_requests_total{handler="/m/{name}",method="GET",status="200"} 2.0' in text
    assert 'http_requests_total{handler="unknown",method="other",status="404"} 1.0' in text
    assert "passwd" not in text


def test_messages_are_bounded() -> None:
    assert len(error_body(400, "x" * 5000)) < 1200


def test_a_refused_body_is_read_on_before_the_answer() -> None:
    app = host(Route("POST", "/x", hello, "public"), max_body_bytes=8)
    for headers in ({"content-length": "40"}, {}):
        chunks = [b"x" * 10] * 4
        assert call(app, "POST", "/x", headers, chunks)[0] == 413

    read: list[int] = []

    async def receive() -> Any:
        read.append(1)
        return {"type": "http.request", "body": b"x" * 8, "more_body": True}

    async def run(*headers: tuple[bytes, bytes]) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        length = (b"content-length", b"9" * 30)
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [length, *headers]}
        await app(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(run()) == 413
    assert len(read) == 16  # bounded
    read.clear()
    assert asyncio.run(run((b"expect", b"100-continue"))) == 413
    assert not read  # such a client sends nothing before it is asked to
