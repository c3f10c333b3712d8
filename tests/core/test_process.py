"""The engine in a process of its own: start, errors, death on either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from cardcage.core.client import AsyncEngine
from cardcage.core.errors import (
    AdmissionError,
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    ModelError,
    PlanMismatch,
)
from cardcage.core.process import ProcessLink, decode_error, encode_error, require_packages
from cardcage.core.types import GenRequest
from tests.support.fake_engine import BUILDER, ByteTokenizer

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def serving(**engine: Any) -> AsyncIterator[tuple[AsyncEngine, ProcessLink]]:
    client, link = client_of({"engine": engine})
    await client.start()
    try:
        yield client, link
    finally:
        await client.close()


def client_of(argument: dict[str, Any] | None = None) -> tuple[AsyncEngine, ProcessLink]:
    link = ProcessLink(None, builder=BUILDER, argument=argument or {})
    return AsyncEngine(link, load_tokenizer=ByteTokenizer), link


def request(**params: Any) -> GenRequest:
    return GenRequest(prompt="hi", params={"max_tokens": 8, "temperature": 0, **params})


async def text(client: AsyncEngine, **params: Any) -> str:
    stream = await client.submit(request(**params))
    return "".join([delta.text async for delta in stream])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not alive(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_serves_stops_and_leaves_nothing() -> None:
    async def main() -> int:
        client, link = client_of({"engine": {"step_s": 0.002}})
        await client.start()
        assert client.info.name == "fake"
        assert client.health() == ("ok", "")
        first = await text(client)
        assert len(first) == 8
        assert await text(client) == first
        stream = await client.submit(request(n=2, logprobs=1, prompt_logprobs=0, max_tokens=100))
        delta = await stream.__anext__()
        assert delta.logprobs[0].token_id == delta.token_ids[0]
        assert stream.prompt_logprobs is not None
        assert stream.prompt_logprobs[0] is None
        stream.cancel()
        for _ in range(100):
            stats = await client.stats()
            if not stats.num_running and not stats.kv_usage:
                break
            await asyncio.sleep(0.01)
        assert (stats.num_running, stats.kv_usage) == (0, 0.0)
        assert stats.finished["abort"] == 2
        with pytest.raises(InvalidRequest):
            await client.submit(request(top_p=0))
        assert link.pid is not None
        folder = link._folder
        await client.close()
        assert folder is not None
        assert not Path(folder).exists()
        return link.pid

    assert not alive(asyncio.run(main()))


def test_start_up_errors_keep_their_class_and_text() -> None:
    async def main() -> None:
        client, _ = client_of({"fail": "no such model: x"})
        with pytest.raises(ModelError, match="no such model: x"):
            await client.start()
        assert client.health()[0] == "dead"

    asyncio.run(main())


def test_progress_arrives_while_starting() -> None:
    async def main() -> None:
        client, _ = client_of({"delay_s": 0.5})
        starting = asyncio.create_task(client.start())
        for _ in range(600):
            await asyncio.sleep(0.01)
            if client.progress[0] == "loading":
                break
        assert client.health() == ("starting", "the engine is starting: loading (50%)")
        await starting
        await client.close()

    asyncio.run(main())


def test_admission_errors_cross_the_boundary() -> None:
    async def main() -> None:
        async with serving(max_seqs=1, max_queue=1, step_s=0.02) as (client, _):
            streams = []
            for _ in range(2):
                streams.append(await client.submit(request(max_tokens=200)))
                await streams[0].__anext__()
            with pytest.raises(AdmissionError) as caught:
                await client.submit(request())
            assert caught.value.retry_after_s == 2.0

    asyncio.run(main())


def test_killed_engine_fails_streams_within_two_seconds() -> None:
    async def main() -> None:
        async with serving(step_s=0.02) as (client, link):
            streams = [await client.submit(request(max_tokens=200)) for _ in range(3)]
            await streams[0].__anext__()
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
            start = time.monotonic()
            for stream in streams:
                with pytest.raises(EngineDead, match="SIGKILL"):
                    async for _ in stream:
                        pass
            assert time.monotonic() - start < 2
            assert "SIGKILL" in client.health()[1]
            assert client.dead.is_set()
            with pytest.raises(EngineDead):
                await client.submit(request())

    asyncio.run(main())


def test_failing_engine_says_why() -> None:
    async def main() -> None:
        async with serving(fail_at_step=3) as (client, _):
            with pytest.raises(EngineDead, match="told to fail"):
                await text(client, max_tokens=50)

    asyncio.run(main())


def test_closing_while_it_starts_ends_the_child() -> None:
    async def main() -> int:
        client, link = client_of({"delay_s": 30})
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.3)
        pid = link.pid
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        assert pid is not None
        return pid

    assert gone_within(asyncio.run(main()), 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_dies_with_its_parent(how: signal.Signals) -> None:
    code = (
        "import asyncio\n"
        "from tests.core.test_process import client_of\n"
        "async def main():\n"
        "    client, link = client_of()\n"
        "    await client.start()\n"
        "    print(link.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(how)
    parent.wait(10)
    parent.stdout.close()
    assert gone_within(child, 2)


def test_errors_as_data() -> None:
    for error in (
        InvalidRequest("bad", "n"),
        AdmissionError("full", 3.0),
        ModelError("x"),
        EngineDead("y"),
    ):
        back = decode_error(encode_error(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert getattr(back, "param", None) == getattr(error, "param", None)
    assert decode_error(encode_error(AdmissionError("full", 3.0))).retry_after_s == 3.0
    other = decode_error(encode_error(KeyError("k")))
    assert type(other) is EngineError
    assert "KeyError" in str(other)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "zmq" else real(name, *a)
    )
    with pytest.raises(ConfigError, match=r"needs pyzmq.*server.process = \"inline\""):
        require_packages()


def test_a_child_that_sees_other_plugins_refuses() -> None:
    from cardcage.core.config import load_config

    class Tampered(ProcessLink):
        def _job(self) -> dict[str, Any]:
            job = super()._job()
            plan = json.loads(job["plan"])
            plan["slots"][0]["digest"] = "files:other"
            return {**job, "plan": json.dumps(plan)}

    async def main() -> None:
        config = load_config(env={}, overrides={"model": "dummy:none", "plugins.mode": "all"})
        client = AsyncEngine(Tampered(config))
        with pytest.raises(PlanMismatch, match="the engine process sees other content"):
            await client.start()

    asyncio.run(main())
