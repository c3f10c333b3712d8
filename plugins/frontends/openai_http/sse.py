"""Server-sent events, and what happens when the client leaves.

One task watches the connection while another answers. A stream holds no queue: text that the
client does not read yet waits in the engine client, merged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from cardcage.core.contracts import GenStream
from cardcage.core.errors import EngineError
from cardcage.core.types import TextDelta
from cardcage.plugins.frontends.openai_http.errors import error_object, to_api_error

logger = logging.getLogger(__name__)

try:
    import msgspec

    dumps: Callable[[Any], bytes] = msgspec.json.Encoder().encode
except ImportError:  # slower, same bytes
    _encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

    def dumps(value: Any) -> bytes:
        return _encoder.encode(value).encode("utf-8", "replace")


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(value: Any) -> bytes:
    """One `data:` line with its blank line."""
    return b"data: " + dumps(value) + b"\n\n"


class Watch:
    """Cancels streams when the client leaves. Use as an async context manager.

    Args:
        receive: ASGI receive; the request's body must have been read.
        streams: cancelled at once on a disconnect, and closed on leaving the context.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]], streams: Iterable[GenStream]) -> None:
        self._receive = receive
        self._streams = list(streams)
        self.gone = False

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for stream in self._streams:
            stream.cancel()

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        for stream in self._streams:
            stream.cancel()


async def merged(streams: list[GenStream]) -> AsyncIterator[tuple[int, TextDelta]]:
    """Deltas of several streams as they come, each with its stream's position."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, delta
    finally:
        for task in waiting:
            task.cancel()


class EventStream:
    """An ASGI answer that sends events until they end, the client leaves, or it stops reading.

    Args:
        events: encoded events; closed in any case.
        streams: the engine streams behind them.
        request_id: for error messages and the log.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        streams: list[GenStream],
        request_id: str,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        keep_alive_s: float = 0.0,
        write_timeout_s: float = 300.0,
    ) -> None:
        self._events = events
        self._streams = streams
        self._request_id = request_id
        self._headers = [*HEADERS, *headers]
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with Watch(receive, self._streams) as watch:
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await send(start)
            try:
                async for chunk in self._paced():
                    if watch.gone:
                        return
                    await self._write(send, chunk)
                if not watch.gone:
                    await self._write(send, DONE, more=False)
            except TimeoutError:
                logger.warning("%s: the client reads nothing; aborted", self._request_id)

    async def _write(self, send: Any, body: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _paced(self) -> AsyncIterator[bytes]:
        """The events, keep-alive comments in silence, and a failure as a last event."""
        try:
            if self._keep_alive_s <= 0:
                async for chunk in self._events:
                    yield chunk
                return
            pending = asyncio.ensure_future(anext(self._events))
            try:
                while True:
                    done, _ = await asyncio.wait([pending], timeout=self._keep_alive_s)
                    if not done:
                        yield KEEP_ALIVE
                        continue
                    yield pending.result()
                    pending = asyncio.ensure_future(anext(self._events))
            except StopAsyncIteration:
                return
            finally:
                pending.cancel()
        except EngineError as error:
            logger.error("%s failed while streaming: %s", self._request_id, error)
            yield event(error_object(to_api_error(error, self._request_id)))
        except Exception as error:  # the status is out: an event is all that can tell the client
            logger.exception("%s failed while streaming", self._request_id)
            yield event(error_object(to_api_error(error, self._request_id)))
