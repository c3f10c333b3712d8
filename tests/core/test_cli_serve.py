"""`cardcage serve` as a process: taken ports, start-up, draining, the engine's death."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cardcage.core.cli_serve import bind, chosen_plugins, main_serve
from cardcage.core.config import load_config
from cardcage.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
# The real command, with a fake engine where the model would be.
DRIVER = """
import sys, json, time
from cardcage.core import cli_serve
from cardcage.core.client import AsyncEngine
from cardcage.core.engine_loop import InlineLink
from tests.support.fake_engine import make_parts
options = json.loads(sys.argv[1])
delay = options.pop("delay_s", 0)
fail = options.pop("fail", None)
def build(progress):
    progress("loading weights", 1, 4)
    time.sleep(delay)
    if fail:
        from cardcage.core.errors import ModelError
        raise ModelError(fail)
    parts = make_parts(**options)
    parts.explain = {"chosen": {"attention": ["fake"]}}
    return parts
def from_config(config, make_metrics=None):
    return AsyncEngine(InlineLink(build), make_metrics=make_metrics)
AsyncEngine.from_config = from_config
raise SystemExit(cli_serve.main_serve(sys.argv[2:]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    *flags: str, wait: str = "/health", **engine: Any
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(engine), "--port", str(port), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as web:
        try:
            end = time.monotonic() + 30
            while time.monotonic() < end and process.poll() is None:
                try:
                    if web.get(wait).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.02)
            yield process, web
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def output(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def test_a_taken_port_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        start = time.monotonic()
        assert main_serve(["nowhere/model", "--port", str(port)]) == 2
        assert time.monotonic() - start < 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--port" in error


def test_two_servers_on_one_port() -> None:
    with serving() as (_, web):
        port = str(web.base_url.port)
        second = subprocess.run(
            [sys.executable, "-c", DRIVER, "{}", "--port", port],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert second.returncode == 2
        assert "cannot listen" in second.stderr
        assert web.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--prot", "1"], "--port"),
        (["--scheduler.polcy=fcfs"], "policy"),
        (["a", "b"], "unknown argument 'b'"),
        (["--port", "no"], "port"),
    ],
)
def test_wrong_arguments_suggest(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        main_serve(argv)


def test_ipv6_and_any_port() -> None:
    with bind(load_config(env={}, overrides={"port": 0})) as listener:
        assert listener.getsockname()[1] > 0


def test_health_while_starting_then_the_banner_and_its_curl_line() -> None:
    with serving(wait="/version", delay_s=1.0) as (process, web):
        starting = web.get("/health")
        assert starting.status_code == 503
        assert "loading weights (25%)" in starting.json()["error"]["message"]
        end = time.monotonic() + 20
        while web.get("/health").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        text = output(process)
        assert "Cardcage serves fake at http://127.0.0.1:" in text
        assert "attention" in text
        assert "curl http://127.0.0.1:" in text


def test_the_curl_line_works() -> None:
    with serving() as (process, _):
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].lstrip().startswith("-d"):
            lines.append(process.stdout.readline())
            assert lines[-1], "the server ended without its banner"
        command = "".join(lines[-2:]).replace("\\\n", " ")
        answer = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=20, check=False
        )
        if answer.returncode == 127:
            pytest.skip("curl is not installed")
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_sigterm_lets_ten_streams_finish() -> None:
    answers: list[str] = []
    with serving(step_s=0.02) as (process, web):

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 200, "stream": True, "temperature": 0}
            answers.append(web.post("/v1/completions", json=body).text)

        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while 'num_requests_running{engine="0",model_name="fake"} 10.0' not in (
            web.get("/metrics").text
        ):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert web.get("/health").status_code == 503
        late = web.post("/v1/completions", json={"prompt": "x"})
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        for thread in threads:
            thread.join(20)
        assert process.wait(10) == 0
    assert len(answers) == 10
    for text in answers:
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text


def test_what_does_not_finish_in_time_ends_with_an_error_event() -> None:
    texts: list[str] = []
    with serving("--shutdown-timeout", "0.2", step_s=0.05) as (process, web):

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 200, "stream": True}
            texts.append(web.post("/v1/completions", json=body).text)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.5)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5
        thread.join(5)
    assert "shutting down" in texts[0] or '"code":500' in texts[0]
    assert texts[0].endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_at_once() -> None:
    with serving("--shutdown-timeout", "60", step_s=0.05) as (process, web):
        thread = threading.Thread(target=lambda: _ignore_errors(web))
        thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 128 + signal.SIGTERM
        thread.join(5)


def _ignore_errors(web: httpx.Client) -> None:
    with suppress(httpx.TransportError):
        web.post("/v1/completions", json={"prompt": "x", "max_tokens": 200})


def test_a_dead_engine_ends_the_server() -> None:
    with serving(fail_at_step=2) as (process, web):
        assert web.post("/v1/completions", json={"prompt": "x"}).status_code == 500
        assert process.wait(5) == 1
        assert "told to fail" in output(process)


def test_a_start_that_fails_says_why() -> None:
    with serving(fail="no such model: x") as (process, _):
        assert process.wait(10) == 1
        text = output(process)
        assert "cardcage: no such model: x" in text
        assert "Traceback" not in text


def test_chosen_plugins() -> None:
    assert chosen_plugins({"chosen": {"a": ["x", "y"], "b": "z"}}) == {"a": "x, y", "b": "z"}
    assert chosen_plugins({}) == {}
