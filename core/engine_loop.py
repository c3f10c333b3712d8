"""The thread that steps an engine, and what a client may ask of it.

`EngineLoop.run` owns the engine: nothing else may touch it. Commands arrive through a queue and
are carried out between steps; outputs leave through a callback. An idle loop blocks on the
queue. The same loop runs in a thread of the serving process or alone in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cardcage.core.contracts import Tokenizer
from cardcage.core.errors import EngineDead, EngineError, RequestError
from cardcage.core.types import EngineStats, Request, TokenOutput

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Reply = Callable[[Any, BaseException | None], None]
_STALL_S = 0.002  # first wait when no request can be scheduled; doubles up to the maximum
_MAX_STALL_S = 0.05
_JOIN_S = 30.0  # a step that takes longer is left to the daemon thread
CALLS = frozenset({"stats", "pause", "resume", "reset_prefix_cache"})


class EngineLike(Protocol):
    """The part of `Engine` that the loop uses."""

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[TokenOutput]: ...
    def stats(self) -> EngineStats: ...


class EngineLoop:
    """Steps an engine until told to stop.

    Args:
        engine: used by the thread that calls `run` alone.
        emit: gets every non-empty batch of outputs, on that thread; must not block.
    """

    def __init__(self, engine: Any, emit: Callable[[list[TokenOutput]], None]) -> None:
        self.engine: EngineLike = engine
        self._emit = emit
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._deadline: float | None = None
        self._stall_s = 0.0
        self._steps = -1

    # ---- any thread

    def add(self, requests: Sequence[Request], reply: Reply) -> None:
        """Admit all or none; `reply(None, error)` is called on the loop's thread."""
        self._inbox.put(("add", requests, reply))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._inbox.put(("abort", request_ids))

    def call(self, name: str, args: Sequence[Any], reply: Reply) -> None:
        """One of `CALLS` on the engine; `reply(value, error)` on the loop's thread."""
        self._inbox.put(("call", name, args, reply))

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop's thread, between two steps."""
        self._inbox.put(("post", function, args))

    def stop(self, drain_s: float = 0.0) -> None:
        """End the loop once nothing runs, or after `drain_s` seconds."""
        self._inbox.put(("stop", drain_s))

    # ---- the engine's thread

    def run(self) -> None:
        """Step until stopped. An exception of the engine is raised to the caller."""
        engine = self.engine
        while True:
            self._take_commands(block=not engine.has_work())
            if self._deadline is not None and (
                not engine.has_work() or time.monotonic() >= self._deadline
            ):
                return
            if engine.has_work():
                self._step()

    def _step(self) -> None:
        outputs = self.engine.step()
        if outputs:
            self._stall_s = 0.0
            self._emit(outputs)
            return
        steps = self.engine.stats().steps
        if steps != self._steps:
            self._steps, self._stall_s = steps, 0.0
        else:  # paused or parked: wait for a command, look again now and then
            self._stall_s = min(max(self._stall_s * 2, _STALL_S), _MAX_STALL_S)

    def _take_commands(self, block: bool) -> None:
        if block and self._deadline is None:
            self._handle(self._inbox.get())
        elif self._stall_s:
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._stall_s))
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    def _handle(self, command: tuple[Any, ...]) -> None:
        kind = command[0]
        if kind == "add":
            self._add(command[1], command[2])
        elif kind == "abort":
            self.engine.abort(command[1])
        elif kind == "call":
            _, name, args, reply = command
            try:
                value = getattr(self.engine, name)(*args)
            except EngineError as error:
                reply(None, error)
            else:
                reply(value, None)
            self._stall_s = 0.0
        elif kind == "post":
            command[1](*command[2])
        else:
            self._deadline = time.monotonic() + command[1]

    def _add(self, requests: Sequence[Request], reply: Reply) -> None:
        admitted: list[str] = []
        try:
            for request in requests:
                self.engine.add_request(request)
                admitted.append(request.request_id)
        except RequestError as error:
            self.engine.abort(admitted)
            reply(None, error)
        else:
            reply(None, None)


# ---- links: how a client reaches a loop ---------------------------------------------------------


@dataclass(slots=True)
class Ready:
    """What a client learns when the engine is up. `tokenizer` only if it is in this process."""

    info: Any
    tokenizer: Tokenizer | None = None
    explain: dict[str, Any] = field(default_factory=dict)


class LinkSink(Protocol):
    """Where a link delivers, always on the client's event loop."""

    def on_outputs(self, outputs: list[TokenOutput]) -> None: ...
    def on_progress(self, what: str, done: int, total: int) -> None: ...
    def on_dead(self, reason: str) -> None: ...


class EngineLink(Protocol):
    """A client's way to an engine. Methods are called on the client's event loop."""

    async def start(self, sink: LinkSink) -> Ready:
        """Build the engine and load the model. Raises what that raised."""

    async def add(self, requests: Sequence[Request]) -> None:
        """Admit all or none. Raises RequestError, or EngineDead."""

    def abort(self, request_ids: Sequence[str]) -> None: ...
    async def call(self, name: str, *args: Any) -> Any: ...
    async def close(self, drain_s: float = 0.0) -> None: ...


class InlineLink:
    """The engine in a thread of this process.

    Args:
        build: makes the engine on that thread: `build(progress) -> parts` with attributes
            `engine`, `info`, `tokenizer`, `explain` and `close()`.
    """

    def __init__(self, build: Callable[[Progress], Any]) -> None:
        self._build = build
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine_loop: EngineLoop | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._dead: str | None = None
        self._closing = False

    async def start(self, sink: LinkSink) -> Ready:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        ready: asyncio.Future[Ready] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(ready,), name="cardcage-engine", daemon=True
        )
        self._thread.start()
        return await ready

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens
            self._loop.call_soon_threadsafe(function, *args)

    def _main(self, ready: asyncio.Future[Ready]) -> None:
        try:
            parts = self._build(lambda *p: self._post(self._sink.on_progress, *p))
        except BaseException as error:
            self._post(_fail, ready, error)
            return
        if self._closing:  # nobody waited for the end of start-up
            parts.close()
            return
        loop = EngineLoop(parts.engine, lambda out: self._post(self._sink.on_outputs, out))
        self._engine_loop = loop
        self._post(_finish, ready, Ready(parts.info, parts.tokenizer, parts.explain))
        try:
            loop.run()
        except BaseException as error:
            logger.exception("the engine thread failed")
            self._post(self._die, f"the engine failed: {type(error).__name__}: {error}")
        finally:
            parts.close()

    def _die(self, reason: str) -> None:
        if self._dead is None and not self._closing:
            self._dead = reason
            for future in list(self._pending):
                _fail(future, EngineDead(reason))
            self._sink.on_dead(reason)

    def _reply(self) -> tuple[asyncio.Future[Any], Reply]:
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

        def reply(value: Any, error: BaseException | None) -> None:
            if error is not None:
                self._post(_fail, future, error)
            else:
                self._post(_finish, future, value)

        return future, reply

    def _running(self) -> EngineLoop:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._engine_loop is None:
            raise EngineDead("the engine is not running")
        return self._engine_loop

    async def add(self, requests: Sequence[Request]) -> None:
        loop = self._running()
        future, reply = self._reply()
        loop.add(requests, reply)
        await future

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._engine_loop is not None:
            self._engine_loop.abort(request_ids)

    async def call(self, name: str, *args: Any) -> Any:
        if name not in CALLS:
            raise ValueError(f"unknown engine call {name!r}")
        loop = self._running()
        future, reply = self._reply()
        loop.call(name, args, reply)
        return await future

    async def close(self, drain_s: float = 0.0) -> None:
        self._closing = True
        if self._engine_loop is not None and self._thread is not None:
            self._engine_loop.stop(drain_s)
            await asyncio.to_thread(self._thread.join, drain_s + _JOIN_S)
        for future in list(self._pending):
            _fail(future, EngineDead("the engine was closed"))


def _finish(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
