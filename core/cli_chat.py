"""`cardcage chat` and `cardcage complete`: talk to a model in the terminal, streaming.

Without --url the model runs in this process; with it, any OpenAI-compatible server answers.
Ctrl-C stops an answer; Ctrl-C or Ctrl-D at the prompt ends the conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cardcage.core.config import take_config_args
from cardcage.core.errors import ConfigError, EngineError

_FLAGS = (
    "--url",
    "--model-name",
    "--api-key",
    "--system-prompt",
    "--stats",
    "--temperature",
    "--top-p",
    "--max-tokens",
    "--seed",
    "--help",
)
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Piece:
    """Some text of an answer and the number of tokens in it (0 when unknown)."""

    text: str
    num_tokens: int = 0


class Speaker(Protocol):
    """Who answers."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]: ...
    def complete(self, prompt: str) -> Iterator[Piece]: ...
    def close(self) -> None: ...


class LocalSpeaker:
    """The engine in this process."""

    def __init__(self, llm: Any, params: Mapping[str, Any]) -> None:
        self._llm, self._params = llm, params

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
        from cardcage.core.types import GenRequest

        return self._run(GenRequest(messages=messages, params=self._params))

    def complete(self, prompt: str) -> Iterator[Piece]:
        from cardcage.core.types import GenRequest

        return self._run(GenRequest(prompt=prompt, params=self._params, default_max_tokens=128))

    def _run(self, request: Any) -> Iterator[Piece]:
        for delta in self._llm.stream(request):
            yield Piece(delta.text, len(delta.token_ids))

    def close(self) -> None:
        self._llm.close()


class RemoteSpeaker:
    """A server with an OpenAI-compatible API.

    Args:
        url: with or without the trailing /v1.
        model: the name to ask for; None asks the server for its first one.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, params: Mapping[str, Any]
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._params = params
        self._model = model or str(self._json("/models")["data"][0]["id"])

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        import urllib.error
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            text = error.read(4096).decode("utf-8", "replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise EngineError(f"{self._base}{path} answered {error.code}: {text}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"cannot reach {self._base}: {reason}") from None

    def _json(self, path: str) -> Any:
        with self._open(path) as response:
            return json.load(response)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
        body = {"messages": list(messages)}
        for chunk in self._stream("/chat/completions", body):
            for choice in chunk.get("choices", ()):
                yield Piece(choice.get("delta", {}).get("content") or "")
            yield _usage(chunk)

    def complete(self, prompt: str) -> Iterator[Piece]:
        for chunk in self._stream("/completions", {"prompt": prompt, "max_tokens": 128}):
            for choice in chunk.get("choices", ()):
                yield Piece(choice.get("text") or "")
            yield _usage(chunk)

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        asked = {"model": self._model, "stream": True, **body, **self._params}
        asked["stream_options"] = {"include_usage": True}
        with self._open(path, asked) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise EngineError(f"the server failed: {chunk['error'].get('message')}")
                yield chunk

    def close(self) -> None:
        """Every answer has a connection of its own."""


def _usage(chunk: Mapping[str, Any]) -> Piece:
    return Piece("", (chunk.get("usage") or {}).get("completion_tokens", 0))


def main_chat(argv: Sequence[str]) -> int:
    """An interactive conversation, or one answer with -q."""
    args, speaker = _start("chat", argv)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    try:
        if args.quick is not None:
            messages.append({"role": "user", "content": args.quick})
            _say(speaker.chat(messages), args.stats)
            return 0
        return _converse(speaker, messages, args.stats)
    finally:
        speaker.close()


def main_complete(argv: Sequence[str]) -> int:
    """Complete one text: that of -q, or standard input."""
    args, speaker = _start("complete", argv)
    try:
        prompt = args.quick if args.quick is not None else sys.stdin.read()
        _say(speaker.complete(prompt), args.stats)
        return 0
    finally:
        speaker.close()


def _converse(speaker: Speaker, messages: list[dict[str, str]], stats: bool) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a message; /reset starts over, /exit or Ctrl-D ends.")
        _enable_line_editing()
    system = list(messages)
    while True:
        try:
            text = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text.strip() in ("/exit", "/quit"):
            return 0
        if text.strip() == "/reset":
            messages[:] = system
            continue
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _say(speaker.chat(messages), stats)
        except EngineError as error:
            print(f"cardcage: {error}", file=sys.stderr)
            messages.pop()
            if not interactive:
                return 1
            continue
        messages.append({"role": "assistant", "content": answer})


def _say(pieces: Iterator[Piece], stats: bool) -> str:
    """Print an answer as it comes; Ctrl-C ends it early. Returns its text."""
    said: list[str] = []
    tokens, start, first = 0, time.monotonic(), None
    try:
        for piece in pieces:
            tokens += piece.num_tokens
            if piece.text:
                first = first or time.monotonic()
                said.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    end = time.monotonic()
    print()
    if stats and first is not None:
        rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
        print(
            f"[{tokens} tokens, first after {first - start:.2f} s, {rate:.1f} tok/s]",
            file=sys.stderr,
        )
    return "".join(said)


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is what enables it)


def _start(command: str, argv: Sequence[str]) -> tuple[argparse.Namespace, Speaker]:
    parser = argparse.ArgumentParser(
        prog=f"cardcage {command}",
        description=f"{command.capitalize()} with a model here, or with a server (--url).",
        epilog="config flags work as in `cardcage serve` when the model runs here.",
    )
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="model reference")
    parser.add_argument("--url", help="address of an OpenAI-compatible server")
    parser.add_argument("--model-name", help="model to ask the server for")
    parser.add_argument("--api-key", help="key of that server; default: OPENAI_API_KEY")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="one message, one answer")
    if command == "chat":
        parser.add_argument("--system-prompt", metavar="TEXT")
    parser.add_argument("--stats", action="store_true", help="tokens and speed after each answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--seed", dest="sample_seed", type=int)
    found = take_config_args(argv, (*_FLAGS, "--quick"))
    args = parser.parse_args(found.rest)
    names = (("temperature", "temperature"), ("top_p", "top_p"), ("max_tokens", "max_tokens"))
    params = {n: getattr(args, a) for n, a in names if getattr(args, a) is not None}
    if args.sample_seed is not None:
        params["seed"] = args.sample_seed
    if args.url:
        if args.model or found.files or found.values:
            raise ConfigError("with --url the server has its own model and config: leave ours out")
        key = args.api_key or os.environ.get("OPENAI_API_KEY")
        return args, RemoteSpeaker(args.url, args.model_name, key, params)
    if args.model_name:
        raise ConfigError("--model-name is for --url; name the model as the first argument")
    if args.api_key:
        raise ConfigError("--api-key is for --url; a model that runs here needs no key")
    from cardcage.core.llm import LLM

    config = found.load({"model": args.model} if args.model else None)
    return args, LocalSpeaker(LLM(config=config), params)
