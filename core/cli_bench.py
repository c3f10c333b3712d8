"""`cardcage bench`: measure this engine offline, its start, or any OpenAI-compatible server.

    cardcage bench throughput   many requests at once: tokens per second
    cardcage bench latency      one batch: time to first token, time per output token
    cardcage bench startup      the command to the first healthy answer, and memory at idle
    cardcage bench serve        clients against a server by URL (ours or another)

Prompts are random token ids from a seed (offline), or numbered words (over HTTP), so no prefix
cache answers by accident. Results are printed and, with --json, written as one row per figure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cardcage.core.errors import ConfigError, EngineError


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code."""
    args = _parser().parse_args(list(argv))
    rows = args.run(args)
    for row in rows:
        print(f"{row['metric']:<28}{row['value']:>12.3f} {row['unit']}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cardcage bench", description=__doc__.splitlines()[0])
    sub = parser.add_subparsers(dest="what", required=True)
    offline = argparse.ArgumentParser(add_help=False)
    offline.add_argument("model", nargs="?", default="", help="model reference")
    offline.add_argument("--config", help="config file")
    offline.add_argument("--dtype", default="auto")
    offline.add_argument("--input-len", type=_positive, default=128, help="prompt tokens")
    offline.add_argument("--output-len", type=_positive, default=64, help="new tokens")
    offline.add_argument("--seed", type=int, default=0)
    offline.add_argument("--json", help="write the rows to this file")

    throughput = sub.add_parser("throughput", parents=[offline], help="tokens per second")
    throughput.add_argument("--num-prompts", type=_positive, default=32)
    throughput.set_defaults(run=_throughput)

    latency = sub.add_parser("latency", parents=[offline], help="time to first and next token")
    latency.add_argument("--batch-size", type=_positive, default=1)
    latency.add_argument("--repetitions", type=_positive, default=3)
    latency.set_defaults(run=_latency)

    startup = sub.add_parser("startup", help="from the command to the first healthy answer")
    startup.add_argument("model", nargs="?", default="")
    startup.add_argument("--config")
    startup.add_argument("--repetitions", type=_positive, default=3)
    startup.add_argument("--json")
    startup.set_defaults(run=_startup)

    serve = sub.add_parser("serve", help="clients against a server")
    serve.add_argument("--url", default="http://127.0.0.1:8000")
    serve.add_argument("--model", default="", help="name to ask for; default: the server's first")
    serve.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""))
    serve.add_argument("--num-prompts", type=_positive, default=64)
    serve.add_argument("--max-concurrency", type=_positive, default=16)
    serve.add_argument("--input-words", type=_positive, default=48, help="words per prompt")
    serve.add_argument("--output-len", type=_positive, default=64)
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--json")
    serve.set_defaults(run=_serve)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _row(metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "unit": unit, "command": " ".join(sys.argv)}


# ---- offline ------------------------------------------------------------------------------------


def _generate(llm: Any, prompts: list[list[int]], n: int) -> float:
    """Seconds to generate exactly n tokens for every prompt, greedily."""
    from cardcage.core.types import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return time.perf_counter() - started


def _prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def _open(args: argparse.Namespace) -> Any:
    from cardcage.core.llm import LLM

    return LLM(args.model, dtype=args.dtype, config=args.config)


def _throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(args.seed)
    with _open(args) as llm:
        vocab = llm.info.vocab_size
        _generate(llm, _prompts(rng, 1, 8, vocab), 2)
        seconds = _generate(
            llm, _prompts(rng, args.num_prompts, args.input_len, vocab), args.output_len
        )
    new, old = args.num_prompts * args.output_len, args.num_prompts * args.input_len
    return [
        _row("output tokens per second", new / seconds, "tok/s"),
        _row("all tokens per second", (new + old) / seconds, "tok/s"),
        _row("seconds", seconds, "s"),
    ]


def _latency(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(args.seed)
    first: list[float] = []
    each: list[float] = []
    with _open(args) as llm:
        vocab = llm.info.vocab_size
        _generate(llm, _prompts(rng, args.batch_size, 8, vocab), 2)
        for _ in range(args.repetitions):
            # New prompts every time: the prefix cache must not answer for the prefill.
            first.append(_generate(llm, _prompts(rng, args.batch_size, args.input_len, vocab), 1))
            if args.output_len > 1:
                prompts = _prompts(rng, args.batch_size, args.input_len, vocab)
                whole = _generate(llm, prompts, args.output_len)
                each.append((whole - first[-1]) / (args.output_len - 1))
    rows = [_row("time to first token", statistics.median(first) * 1e3, "ms")]
    if each:
        rows.append(_row("time per output token", statistics.median(each) * 1e3, "ms"))
    return rows


# ---- start --------------------------------------------------------------------------------------


def _startup(args: argparse.Namespace) -> list[dict[str, Any]]:
    seconds, memory = [], []
    for _ in range(args.repetitions):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "cardcage", "serve", *([args.model] if args.model else [])]
        command += ["--port", str(port), *(["--config", args.config] if args.config else [])]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _await_health(process, port)
            seconds.append(time.perf_counter() - started)
            memory.append(_tree_rss(process.pid) / 2**20)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    return [
        _row("start to ready", statistics.median(seconds), "s"),
        _row("memory at idle", statistics.median(memory), "MiB"),
    ]


def _await_health(process: subprocess.Popen[bytes], port: int, limit_s: float = 600.0) -> None:
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            tail = process.stderr.read().decode(errors="replace")[-2000:]
            raise EngineError(f"the server ended before it was ready:\n{tail}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise EngineError(f"the server was not ready after {limit_s:.0f} s")


def _tree_rss(pid: int) -> int:
    """Resident bytes of a process and its children (Linux), shared pages counted once each."""
    total, queue = 0, [pid]
    while queue:
        here = queue.pop()
        try:
            for line in Path(f"/proc/{here}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
            for task in Path(f"/proc/{here}/task").iterdir():
                queue += [int(c) for c in (task / "children").read_text().split()]
        except OSError:
            continue
    return total


# ---- a server -----------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    url = urlsplit(args.url)
    if url.scheme != "http" or not url.hostname:
        raise ConfigError(f"--url must look like http://host:port, got {args.url!r}")
    place = (url.hostname, url.port or 80)
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    model = args.model or _first_model(place, headers)
    rng = random.Random(args.seed)
    words = [
        " ".join(str(rng.randrange(10_000)) for _ in range(args.input_words))
        for _ in range(args.num_prompts)
    ]
    queue = list(enumerate(words))
    lock = threading.Lock()
    results: list[tuple[float, list[float], int]] = []
    faults: list[str] = []

    def client() -> None:
        while True:
            with lock:
                if not queue:
                    return
                _, prompt = queue.pop(0)
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": args.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                result = _one(place, headers, body)
            except (OSError, ValueError, EngineError, http.client.HTTPException) as error:
                faults.append(str(error))
                return
            with lock:
                results.append(result)

    started = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(args.max_concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if faults:
        raise EngineError(f"{len(faults)} clients failed; the first: {faults[0]}")
    first = [r[0] for r in results]
    gaps = [gap for r in results for gap in r[1]] or [0.0]
    rows = [_row("output tokens per second", sum(r[2] for r in results) / seconds, "tok/s")]
    for name, values in (("time to first token", first), ("between chunks", gaps)):
        values.sort()
        for percent in (50, 90, 99):
            at = values[min(len(values) - 1, len(values) * percent // 100)]
            rows.append(_row(f"{name} p{percent}", at * 1e3, "ms"))
    return rows


def _first_model(place: tuple[str, int], headers: dict[str, str]) -> str:
    connection = http.client.HTTPConnection(*place, timeout=30)
    connection.request("GET", "/v1/models", headers=headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise EngineError(f"GET /v1/models answered {response.status}: {body[:200]!r}")
    return str(json.loads(body)["data"][0]["id"])


def _one(
    place: tuple[str, int], headers: dict[str, str], body: dict[str, Any]
) -> tuple[float, list[float], int]:
    """(seconds to the first text, gaps between chunks, output tokens by the server's usage)."""
    connection = http.client.HTTPConnection(*place, timeout=600)
    started = last = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise EngineError(f"status {response.status}: {response.read()[:300]!r}")
    first, gaps, tokens = 0.0, [], 0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise EngineError(f"the stream failed: {event['error']}")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            now = time.perf_counter()
            if first:
                gaps.append(now - last)
            else:
                first = now - started
            last = now
    connection.close()
    return first, gaps, tokens
