"""The engine in a process of its own, and the client's link to it.

The parent ships the resolved config and the plugin plan; the child checks the plan, builds the
engine and reports its progress, then steps. Messages are msgpack over two ZeroMQ sockets in a
private folder: commands down, outputs up. The child never outlives its parent (a pipe that
closes, and on Linux the kernel's parent-death signal); when the child dies, every stream of the
parent ends with the reason.

The child is started by command line, not by fork or by re-importing `__main__`, so it works
from any script, thread or notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cardcage.core import errors
from cardcage.core.config_sources import split_path
from cardcage.core.contracts import Tokenizer
from cardcage.core.engine_loop import CALLS, EngineLoop, LinkSink, Ready
from cardcage.core.errors import ConfigError, EngineDead, EngineError
from cardcage.core.types import EngineStats, Request, TokenOutput

if TYPE_CHECKING:
    from cardcage.core.config import Config
    from cardcage.core.plan import Plan

logger = logging.getLogger(__name__)

# Runs before anything of ours is importable: the parent's search path first.
_BOOT = (
    "import sys, json; job = json.load(sys.stdin); sys.path[:] = job['sys_path']; "
    "from cardcage.core.process import child_main; child_main(job)"
)
_EXIT_ENGINE_FAILED = 70
_EXIT_PARENT_GONE = 75
_TERMINATE_S = 5.0
_LAST_WORDS_S = 0.2


def require_packages() -> None:
    """Raises ConfigError when the packages of the process split are missing."""
    from importlib.util import find_spec

    missing = [
        package
        for module, package in (("msgspec", "msgspec"), ("zmq", "pyzmq"))
        if find_spec(module) is None
    ]
    if missing:
        raise ConfigError(
            f'server.process = "separate" needs {" and ".join(missing)}, which is not installed: '
            f'run "pip install {" ".join(missing)}", or set server.process = "inline"'
        )


def load_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer alone, for a process that holds no weights."""
    from cardcage.core.host import Host, model_reference

    host = Host(config)
    return host.tokenizer(host.open_source(model_reference(config.as_dict())))


def encode_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: its class name, message, and the fields of ours."""
    return {
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "param": getattr(error, "param", None),
        "retry_after_s": getattr(error, "retry_after_s", None),
    }


def decode_error(data: dict[str, Any]) -> EngineError:
    """The exception again, of the same class when it is one of ours, else EngineError."""
    kind, message = data["type"], data["message"]
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, EngineError):
        if issubclass(cls, errors.AdmissionError):
            return cls(message, data["retry_after_s"] or 1.0)
        if issubclass(cls, errors.RequestError):
            return cls(message, data["param"])
        return cls(message)
    return EngineError(f"{kind}: {message}")


# ---- the parent's side --------------------------------------------------------------------------


class ProcessLink:
    """An `EngineLink` to a child process.

    Args:
        config: the resolved config; None only with `builder`.
        builder: "module:function" called in the child instead of the host's `build_engine`
            (`function(argument, progress)`), for tests.
        argument: plain data for `builder`.

    Raises:
        ConfigError: msgspec or pyzmq is missing.
    """

    def __init__(
        self, config: Config | None, *, builder: str | None = None, argument: Any = None
    ) -> None:
        require_packages()
        self._config = config
        self._builder = builder
        self._argument = argument
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Future[Ready] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._dead: str | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid if self._process is not None else None

    def spawn(self) -> None:
        """Start the child without waiting for it; `start` does this when it was not done."""
        if self._process is not None:
            return
        self._folder = tempfile.mkdtemp(prefix="cardcage-")
        read_end, self._alive_pipe = os.pipe()
        job = {**self._job(), "folder": self._folder, "alive_fd": read_end}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            pass_fds=(read_end,),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then drains
        )
        os.close(read_end)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode())
            self._process.stdin.close()

    def _job(self) -> dict[str, Any]:
        """What the child is told, as plain data."""
        return {
            "sys_path": sys.path,
            "parent_pid": os.getpid(),
            "log_level": logging.getLogger("cardcage").getEffectiveLevel(),
            "builder": self._builder,
            "argument": self._argument,
            **(_config_job(self._config) if self._config is not None else {}),
        }

    async def start(self, sink: LinkSink) -> Ready:
        import msgspec
        import zmq
        import zmq.asyncio

        loop = asyncio.get_running_loop()
        self._sink = sink
        self._context = zmq.asyncio.Context()
        self.spawn()
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs = msgspec.msgpack.Decoder(list[TokenOutput])
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket, name in ((self._commands, "down"), (self._events, "up")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{self._folder}/{name}")
        self._ready = loop.create_future()
        self._reader = asyncio.create_task(self._read())
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        return await self._ready

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process is not None
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        """The child ended; its last message, which may say why, gets a moment to arrive."""
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._bury, code)

    def _bury(self, code: int) -> None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        self._die(f"the engine process ended with {how}{hint}")

    def _die(self, reason: str, error: EngineError | None = None) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        starting = self._ready is not None and not self._ready.done()
        if starting and self._ready is not None:
            self._ready.set_exception(error or EngineDead(f"{reason} while starting"))
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(EngineDead(reason))
        self._pending.clear()
        if not starting and not self._closing:
            self._sink.on_dead(reason)

    async def _read(self) -> None:
        import msgspec

        decode = msgspec.msgpack.decode
        while True:
            kind, body = await self._events.recv_multipart()
            if kind == b"out":
                self._sink.on_outputs(self._outputs.decode(body))
                continue
            message = decode(body)
            if kind == b"reply":
                self._on_reply(*message)
            elif kind == b"progress":
                self._sink.on_progress(*message)
            elif kind == b"ready":
                self._on_ready(message)
            elif kind == b"failed":
                error = decode_error(message)
                logger.debug("the engine process failed:\n%s", message.get("traceback", ""))
                self._die(f"the engine failed: {error}", error)

    def _on_ready(self, message: dict[str, Any]) -> None:
        import msgspec

        from cardcage.core.types import ModelInfo

        info = msgspec.convert(message["info"], ModelInfo)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(Ready(info, None, message["explain"]))

    def _on_reply(self, call: int, value: Any, error: dict[str, Any] | None) -> None:
        future = self._pending.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(decode_error(error))
        else:
            future.set_result(value)

    async def _send(self, *message: Any) -> None:
        await self._commands.send(self._encoder.encode(message))

    async def _ask(self, kind: str, *message: Any) -> Any:
        if self._dead is not None:
            raise EngineDead(self._dead)
        self._next_call += 1
        call = self._next_call
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = future
        try:
            await self._send(kind, call, *message)
            return await future
        finally:
            self._pending.pop(call, None)

    async def add(self, requests: Sequence[Request]) -> None:
        await self._ask("add", requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._dead is None:
            task = asyncio.create_task(self._send("abort", request_ids))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def call(self, name: str, *args: Any) -> Any:
        import msgspec

        if name not in CALLS:
            raise ValueError(f"unknown engine call {name!r}")
        value = await self._ask("call", name, args)
        return msgspec.convert(value, EngineStats) if name == "stats" else value

    def _serving(self) -> bool:
        ready = self._ready
        up = ready is not None and ready.done() and not ready.cancelled()
        return up and self._dead is None

    async def close(self, drain_s: float = 0.0) -> None:
        """Ask the child to stop, then make sure that it did."""
        if self._process is None or self._closing:
            return
        self._closing = True
        if self._serving():
            with contextlib.suppress(Exception):
                await self._send("stop", drain_s)
        else:
            self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait, drain_s + _TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        os.close(self._alive_pipe)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._commands.close()
            self._events.close()
            self._context.term()
        self._die("the engine was closed")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _config_job(config: Config) -> dict[str, Any]:
    """What the child needs to resolve the same config: the leaves that somebody set.

    Defaults are left out, so that the platform's proposals apply there as they would here.
    """
    tree = config.as_dict()
    values: dict[str, Any] = {}
    for path in config.origins:
        if config.is_set(path):
            value: Any = tree
            for key in split_path(path):
                value = value[key]
            values[path] = value
    return {"config": values, "plan": inventory(tree).to_json()}


def inventory(tree: Mapping[str, Any]) -> Plan:
    """The plugins that a process may choose from, as a plan: the child must see the same ones.

    Which of them run the model is decided in the child, where the device is.
    """
    from cardcage import __version__
    from cardcage.core.plan import Plan, PlanSlot, content_digest
    from cardcage.core.policy import Policy
    from cardcage.core.registry import Registry

    registry = Registry.discover(Policy.from_config(tree["plugins"]))
    slots = tuple(
        PlanSlot(
            f"{c.kind}.{c.name}",
            c.kind,
            c.id,
            c.version,
            c.value,
            c.location,
            content_digest(c.dist, c.value, c.builtin),
        )
        for c in registry.candidates()
        if c.usable
    )
    return Plan(__version__, slots)


# ---- the child's side ---------------------------------------------------------------------------


def child_main(job: dict[str, Any]) -> None:
    """Entry of the engine process: build, report, step until told to stop."""
    _die_with_parent(job["parent_pid"], job["alive_fd"])
    # The parent decides: it drains first, then says stop, or kills.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=job["log_level"], format="%(levelname)s %(name)s (engine): %(message)s"
    )
    child = _Child(job["folder"])
    try:
        parts = _build(job, child.progress)
    except BaseException as error:
        child.send(b"failed", {**encode_error(error), "traceback": traceback.format_exc()})
        child.close()
        raise SystemExit(_EXIT_ENGINE_FAILED) from None
    code = 0
    try:
        child.serve(parts)
    except BaseException as error:
        logger.exception("the engine failed")
        child.send(b"failed", {**encode_error(error), "traceback": traceback.format_exc()})
        code = _EXIT_ENGINE_FAILED
    with contextlib.suppress(Exception):
        parts.close()
    child.close()
    # A thread may still sit in a driver or a library; nothing of it is worth waiting for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _build(job: dict[str, Any], progress: Callable[[str, int, int], None]) -> Any:
    if job["builder"]:
        from importlib import import_module

        module, _, name = job["builder"].partition(":")
        return getattr(import_module(module), name)(job["argument"], progress)
    from cardcage.core.plan import Plan

    Plan.from_json(job["plan"]).verify("the engine process")
    from cardcage.core.config import load_config
    from cardcage.core.host import build_engine

    env = {"CARDCAGE_CONFIG_DIR": job["folder"]}  # holds no config: nothing is merged twice
    return build_engine(load_config(env=env, overrides=job["config"]), progress)


def _die_with_parent(parent_pid: int, alive_fd: int) -> None:
    """End this process when the parent ends: kernel signal where there is one, and a pipe."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(_EXIT_PARENT_GONE)

    def watch() -> None:
        os.read(alive_fd, 1)  # returns when the parent's end closes
        os._exit(_EXIT_PARENT_GONE)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class _Child:
    """The sockets of the engine process. `send` may be called by one thread at a time."""

    def __init__(self, folder: str) -> None:
        import msgspec
        import zmq

        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._down = self._context.socket(zmq.PULL)
        for socket, name in ((self._up, "up"), (self._down, "down")):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(f"ipc://{folder}/{name}")
        self._reading = False  # then the reader closes its socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.decode
        self._requests: Callable[[Any], list[Request]] = lambda data: msgspec.convert(
            data, list[Request]
        )

    def send(self, kind: bytes, message: Any) -> None:
        self._up.send_multipart((kind, self._encode(message)))

    def progress(self, what: str, done: int, total: int) -> None:
        self.send(b"progress", (what, done, total))

    def serve(self, parts: Any) -> None:
        """Step the engine on this thread; a second thread reads commands."""
        loop = EngineLoop(parts.engine, lambda outputs: self.send(b"out", outputs))
        self.send(b"ready", {"info": parts.info, "explain": parts.explain})
        reader = threading.Thread(target=self._read, args=(loop,), daemon=True)
        reader.start()
        self._reading = True
        loop.run()

    def _read(self, loop: EngineLoop) -> None:
        import zmq

        try:
            self._commands(loop)
        except zmq.ContextTerminated:
            pass  # the process ends
        finally:
            self._down.close(0)

    def _commands(self, loop: EngineLoop) -> None:
        while True:
            kind, *rest = self._decode(self._down.recv())
            if kind == "add":
                try:
                    requests = self._requests(rest[1])
                except Exception as error:
                    loop.post(self._reply(rest[0]), None, EngineError(f"bad request: {error}"))
                else:
                    loop.add(requests, self._reply(rest[0]))
            elif kind == "abort":
                loop.abort(rest[0])
            elif kind == "call":
                loop.call(rest[1], rest[2], self._reply(rest[0]))
            elif kind == "stop":
                loop.stop(rest[0])
                return

    def _reply(self, call: int) -> Callable[[Any, BaseException | None], None]:
        def reply(value: Any, error: BaseException | None) -> None:
            self.send(b"reply", (call, value, None if error is None else encode_error(error)))

        return reply

    def close(self) -> None:
        """Wait, briefly, until the parent has everything, and close the sockets."""
        if not self._reading:
            self._down.close(0)
        self._up.close(1000)
        self._context.term()
