"""`cardcage serve`: one command from a model reference to an OpenAI-compatible server.

Order: read the config, bind the socket (a taken port fails in milliseconds), start the engine
process, then import the web stack and answer `/health` with 503 while the model loads. The first
SIGTERM or SIGINT drains, the second one ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cardcage.core.config import Config, nearest_flag, take_config_args
from cardcage.core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from cardcage.core.client import AsyncEngine
    from cardcage.core.http_host import HttpHost

logger = logging.getLogger(__name__)

_STATS_EVERY_S = 10.0
_DEATH_EXIT_S = 1.0  # after the engine died: time for the last answers to leave
_EPILOG = """config flags: any key of the config as --table.key=value or by its flat name, for
example --port 9000, --max-num-seqs 8, --kv.bytes=2GiB, --config server.toml.
`cardcage config schema` lists them all."""


def main_serve(argv: Sequence[str]) -> int:
    """Run a server until a signal ends it; returns the exit code."""
    args, config = _arguments(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        listener = bind(config)
    except OSError as error:
        server = config.as_dict()["server"]
        print(
            f"cardcage: cannot listen on {server['host']}:{server['port']}: {error.strerror}. "
            "Choose another with --port, or stop the program that uses it.",
            file=sys.stderr,
        )
        return 2
    with listener:
        return asyncio.run(serve(config, listener, args))


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(
        prog="cardcage serve",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder, .gguf file, org/name, pypi:dist, dummy:config.json; none = embedded model",
    )
    parser.add_argument("--access-log", action="store_true", help="log one line per request")
    parser.add_argument(
        "--log-level", default="info", type=str.lower, choices=("debug", "info", "warning", "error")
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that requests in flight get to finish after SIGTERM",
    )
    keep = ("--access-log", "--log-level", "--shutdown-timeout", "--help")
    found = take_config_args(argv, keep)
    args, unknown = parser.parse_known_args(found.rest)
    for word in unknown:
        hint = nearest_flag(word) if word.startswith("-") else ""
        raise ConfigError(f"cardcage serve: unknown argument {word!r}{hint}")
    return args, found.load({"model": args.model} if args.model else None)


def bind(config: Config) -> socket.socket:
    """A listening socket on the configured address. Raises OSError when it is taken."""
    server = config.as_dict()["server"]
    family = socket.AF_INET6 if ":" in server["host"] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server["host"], server["port"]))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def build_frontends(config: Config, client: AsyncEngine) -> tuple[HttpHost, list[Any]]:
    """The configured frontends on one route table.

    Raises:
        ConfigError: two of them claim one route.
        SelectionError, PluginLoadError: a frontend is unknown or does not load.
    """
    from cardcage.core.contracts import FrontendNeed
    from cardcage.core.host import Host
    from cardcage.core.http_host import HttpHost

    host = Host(config)
    server = config.as_dict()["server"]
    routes, built = [], []
    for name in server["frontends"]:
        frontend = host.resolve("frontends", FrontendNeed(), use=name)
        built.append(frontend)
        routes += [(name, route) for route in frontend.routes(client)]
    http = HttpHost(routes, api_keys=server["api_keys"], max_body_bytes=server["max_body_bytes"])
    client.metrics_sources.append(http.metrics.text)
    return http, built


async def serve(config: Config, listener: socket.socket, args: argparse.Namespace) -> int:
    """Serve on a bound socket until a signal or the engine's death. Returns the exit code."""
    from cardcage.core.client import AsyncEngine

    started = time.monotonic()
    client = AsyncEngine.from_config(config, make_metrics=_engine_metrics)
    client.prelaunch()  # the engine process imports and loads while this one does the rest
    http, frontends = build_frontends(config, client)
    http.access_log = args.access_log
    server = _uvicorn(http)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(client.start())
    stop = _Stop(client, server, args.shutdown_timeout)
    stop.install()
    code = 0
    try:
        await asyncio.wait({starting, serving, stop.asked}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            _report(starting.exception())
            code = 1
        elif starting.done():
            _banner(client, listener, time.monotonic() - started)
            code = await _until_end(client, serving, stop)
        else:
            starting.cancel()
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await client.close()
        server.force_exit = True
        await serving
        for frontend in frontends:
            frontend.close()
        stop.remove()
    return code


def _engine_metrics(info: Any) -> Any:
    from cardcage.core.metrics import EngineMetrics

    return EngineMetrics(info.served_names[0], info.max_model_len)


def _uvicorn(app: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Signals are handled here, not by the web server."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=5,
        )
    )


class _Stop:
    """What signals do: the first drains, the second ends at once."""

    def __init__(self, client: AsyncEngine, server: Any, timeout_s: float) -> None:
        self._client, self._server, self._timeout_s = client, server, timeout_s
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count = 0

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._count += 1
        if self._count == 1:
            flying = self._client.num_streams
            logger.info("%s: finishing %d requests", signal.Signals(number).name, flying)
            self._client.drain()
            self.asked.set_result(None)
            return
        os._exit(128 + number)  # the engine process dies with this one

    async def drain(self) -> None:
        """Let requests in flight finish, up to the timeout."""
        if not await self._client.wait_idle(self._timeout_s):
            logger.warning("%d requests did not finish in time", self._client.num_streams)


async def _until_end(client: AsyncEngine, serving: asyncio.Task[None], stop: _Stop) -> int:
    """Run until asked to stop, or until the engine dies. Returns the exit code."""
    stats = asyncio.create_task(_log_stats(client))
    died = asyncio.create_task(client.dead.wait())
    try:
        ends: set[asyncio.Future[Any]] = {serving, stop.asked, died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            logger.error("%s", client.health()[1])
            await asyncio.sleep(_DEATH_EXIT_S)
            return 1
        if stop.asked.done():
            await stop.drain()
        return 0
    finally:
        stats.cancel()
        died.cancel()


async def _log_stats(client: AsyncEngine) -> None:
    """One line every ten seconds while something happens, until the engine is gone."""
    with contextlib.suppress(EngineError):
        await _log_stats_forever(client)


async def _log_stats_forever(client: AsyncEngine) -> None:
    before = await client.stats()
    while True:
        await asyncio.sleep(_STATS_EVERY_S)
        now = await client.stats()
        prompt = now.prompt_tokens - before.prompt_tokens
        generated = now.generation_tokens - before.generation_tokens
        if prompt or generated or now.num_running or now.num_waiting:
            queries = now.prefix_queries - before.prefix_queries
            hits = now.prefix_hits - before.prefix_hits
            logger.info(
                "prompt %.1f tok/s, generation %.1f tok/s, %d running, %d waiting, KV %.0f%%, "
                "prefix hits %.0f%%",
                prompt / _STATS_EVERY_S,
                generated / _STATS_EVERY_S,
                now.num_running,
                now.num_waiting,
                100 * now.kv_usage,
                100 * hits / queries if queries else 0.0,
            )
        before = now


def _report(error: BaseException | None) -> None:
    if isinstance(error, EngineError):
        print(f"cardcage: {error}", file=sys.stderr)
    else:
        logger.error("start-up failed", exc_info=error)


def _banner(client: AsyncEngine, listener: socket.socket, seconds: float) -> None:
    """What is served, by which plugins, and a line to try."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    info = client.info
    print(f"\n  Cardcage serves {info.served_names[0]} at {url}  (ready in {seconds:.1f} s)")
    print(f"  context {info.max_model_len} tokens, scheduling {info.scheduler_policy}")
    for kind, name in chosen_plugins(client.explain).items():
        print(f"  {kind:<12} {name}")
    chat = client.tokenizer is not None and client.tokenizer.chat_template
    if chat:
        body = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}'
        path = "/v1/chat/completions"
    else:
        body, path = '{"prompt": "Hello", "max_tokens": 32}', "/v1/completions"
    print(f"\n  curl {url}{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n")
    sys.stdout.flush()


def chosen_plugins(explain: Any) -> dict[str, str]:
    """Plugin names by kind, from what the host explained."""
    chosen = explain.get("chosen") if isinstance(explain, dict) else None
    return {str(k): ", ".join(v) if isinstance(v, list) else str(v) for k, v in
            (chosen or {}).items()}  # fmt: skip
