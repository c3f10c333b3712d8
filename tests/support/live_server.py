"""A real HTTP server on a loopback port, over a fake engine in the same process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from types import TracebackType
from typing import Any

import httpx
import uvicorn

from cardcage.core.client import AsyncEngine
from cardcage.core.engine_loop import InlineLink
from cardcage.core.http_host import HttpHost
from cardcage.core.metrics import EngineMetrics
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions
from cardcage.plugins.frontends.openai_http.app import OpenAIFrontend
from tests.support.fake_engine import make_parts


class LiveServer:
    """`with LiveServer(...) as server:` serves until the block ends.

    Args:
        parts: what `InlineLink` builds; `**engine` makes fake parts instead.
        options: of the frontend.
        ready: False never starts the engine.
    """

    def __init__(
        self,
        parts: Any = None,
        options: dict[str, Any] | None = None,
        api_keys: tuple[str, ...] = (),
        max_body_bytes: int = 1 << 20,
        ready: bool = True,
        **engine: Any,
    ) -> None:
        self.parts = parts or make_parts(**engine)
        self.engine = self.parts.engine
        self.options = OpenAIHttpOptions(**(options or {}))
        self._api_keys, self._max_body, self._ready = api_keys, max_body_bytes, ready
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = AsyncEngine(
            InlineLink(lambda progress: self.parts),
            make_metrics=lambda info: EngineMetrics(info.served_names[0], info.max_model_len),
        )
        frontend = OpenAIFrontend(self.options, logging.getLogger("test"))
        self.http = HttpHost(
            [("openai-http", route) for route in frontend.routes(self.client)],
            api_keys=self._api_keys,
            max_body_bytes=self._max_body,
        )
        self.client.metrics_sources.append(self.http.metrics.text)
        config = uvicorn.Config(self.http, lifespan="off", log_config=None, access_log=False)
        self.server = uvicorn.Server(config)
        if self._ready:
            await self.client.start()
        self._up.set()
        await self.server.serve(sockets=[self._listener])
        await self.client.close()

    def __enter__(self) -> LiveServer:
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._up.wait(10)
        self.web = httpx.Client(base_url=self.url, timeout=30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.web.close()
        self.server.should_exit = True
        self._thread.join(15)
        self._listener.close()
        assert not self._thread.is_alive()

    def openai(self, **options: Any) -> Any:
        """The real client of the `openai` package."""
        import openai

        return openai.OpenAI(
            base_url=self.url + "/v1", api_key=options.pop("api_key", "none"), max_retries=0,
            **options,
        )  # fmt: skip

    def tasks(self) -> int:
        """Tasks alive on the server's event loop."""
        future = asyncio.run_coroutine_threadsafe(_count(), self.loop)
        return future.result(10)

    def wait_settled(self, timeout_s: float = 2.0) -> None:
        """Nothing runs, no block is held, no stream is open."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            engine = self.engine
            if (
                not self.client.num_streams
                and engine.free_blocks == engine.num_blocks
                and not engine.has_work()
            ):
                return
            time.sleep(0.01)
        raise AssertionError(
            f"{self.client.num_streams} streams, {self.engine.num_blocks} blocks of which "
            f"{self.engine.free_blocks} free"
        )


async def _count() -> int:
    return len(asyncio.all_tasks()) - 1
