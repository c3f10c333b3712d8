"""A live server with the real model, started by the command that users type."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.slow


class Server:
    """`cardcage serve` on a free port of loopback, ended by SIGTERM."""

    def __init__(self, model: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "cardcage", "serve", str(model)]
        command += ["--port", str(self.port), "--dtype", "float32", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while not self._ready():
            assert self.process.poll() is None, self.process.stdout.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < deadline, "the server was not ready in 120 s"
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def gauge(self, name: str) -> float:
        found = re.search(
            rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics")[1], re.M
        )
        assert found is not None, f"no metric {name}"
        return float(found.group(1))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    live = Server(smollm2_path)
    yield live
    if live.process.poll() is None:
        live.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_completions_equal_the_reference(
    client: openai.OpenAI, reference_cases: list[dict[str, Any]]
) -> None:
    case = reference_cases[0]
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model,
        prompt=case["prompt"],
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.choices[0].token_ids == case["output_ids"][:8]  # type: ignore[attr-defined]
    assert answer.usage.prompt_tokens == len(case["prompt_token_ids"])  # type: ignore[union-attr]
    assert answer.choices[0].logprobs is not None
    first = answer.choices[0].logprobs.token_logprobs[0]  # type: ignore[index]
    assert abs(first - case["output_logprobs"][0]) < 1e-3


def test_a_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    ask = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    parts = client.chat.completions.create(**ask, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in parts if c.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()


def test_seeds_repeat_and_samples_differ(client: openai.OpenAI) -> None:
    ask = {"model": client.models.list().data[0].id, "prompt": "Once upon a time", "seed": 7,
           "max_tokens": 12, "temperature": 1.0, "n": 2}  # fmt: skip
    one = client.completions.create(**ask)
    two = client.completions.create(**ask)
    assert [c.text for c in one.choices] == [c.text for c in two.choices]
    assert one.choices[0].text != one.choices[1].text


def test_cancelled_streams_leave_nothing(server: Server, client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    for i in range(200):
        stream = client.completions.create(
            model=model, prompt=f"Count from {i}:", max_tokens=200, stream=True
        )
        if i % 2:
            next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 20
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.gauge(name) for name in gauges):
        assert time.monotonic() < deadline, {name: server.gauge(name) for name in gauges}
        time.sleep(0.1)


def test_errors_have_types(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[1] * 100_000)


def test_sigterm_lets_a_stream_finish(smollm2_path: Path) -> None:
    live = Server(smollm2_path)
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt="A long story:", max_tokens=40, stream=True,
        extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = iter(stream)
    next(chunks)
    live.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert rest[-1].usage.completion_tokens == 40
    assert live.process.wait(30) == 0
