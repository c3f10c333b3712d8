"""An engine without a model, for tests of everything that serves: tokens come from the prefix.

`FakeEngine` has the methods of `Engine`. Its tokens are a pure function of (seed, all tokens so
far), or a script given by prompt. `ByteTokenizer` is a tiny tokenizer: one id per byte, some
words, specials.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cardcage.core.errors import AdmissionError, EngineDead
from cardcage.core.types import (
    EngineStats,
    FinishReason,
    ModelInfo,
    Request,
    TokenLogprob,
    TokenOutput,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (" the", " end", "ab", "cde", " hello", "lo wor")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")


class ByteTokenizer:
    """Ids 0..255 are bytes, then `WORDS` (encoded greedily), then `SPECIALS`."""

    def __init__(self, template: str | None = TEMPLATE) -> None:
        self._tokens = [bytes([i]) for i in range(256)]
        self._tokens += [w.encode() for w in WORDS]
        self._first_special = len(self._tokens)
        self._tokens += [s.encode() for s in SPECIALS]
        self.vocab_size = len(self._tokens)
        self.special_ids = frozenset(range(self._first_special, self.vocab_size))
        self.bos_token_id: int | None = self._first_special + 2
        self.eos_token_ids = (self._first_special + 1,)
        self.chat_template = template
        self.encoded = 0  # calls of encode

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded += 1
        data = text.encode()
        ids = [self.bos_token_id] if add_special_tokens and self.bos_token_id else []
        multi = [(i, t) for i, t in enumerate(self._tokens) if len(t) > 1]
        at = 0
        while at < len(data):
            for token_id, token in multi:
                if data.startswith(token, at):
                    ids.append(token_id)
                    at += len(token)
                    break
            else:
                ids.append(data[at])
                at += 1
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self._tokens[i] for i in ids if i not in hidden).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def token_str(self, token_id: int) -> str:
        return self._tokens[token_id].decode("latin-1")

    def special_tokens(self) -> Mapping[str, str]:
        return {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def letters(request: Request, tokens: Sequence[int]) -> int:
    """The default next token: a lower-case letter or space, from the seed and the prefix."""
    seed = 0 if request.params.greedy else request.seed
    digest = hashlib.blake2b(repr((seed, tuple(tokens[-8:]))).encode(), digest_size=2).digest()
    return b"abcdefghijklmnopqrstuvwxyz     "[digest[0] % 31]


@dataclass
class _Live:
    request: Request
    tokens: list[int]
    arrival_s: float
    first_token_s: float | None = None
    cached: int = 0
    script: list[int] = field(default_factory=list)


class FakeEngine:
    """Runs up to `max_seqs` requests, `per_step` tokens a step each.

    Args:
        next_token: (request, all tokens) -> the next token.
        script: output ids by prompt text (of the byte tokenizer), before `next_token` is asked.
        step_s: how long a step takes.
        num_blocks: one block per live request, so that leaks show; `free_blocks` counts them.
    """

    def __init__(
        self,
        *,
        next_token: Callable[[Request, Sequence[int]], int] = letters,
        script: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        per_step: int = 1,
        step_s: float = 0.0,
        max_seqs: int = 16,
        max_queue: int = 0,
        num_blocks: int = 64,
        fail_at_step: int | None = None,
    ) -> None:
        self._next = next_token
        self._script = script or {}
        self._per_step = per_step
        self._step_s = step_s
        self._max_seqs = max_seqs
        self._max_queue = max_queue
        self._fail_at = fail_at_step
        self.num_blocks = self.free_blocks = num_blocks
        self._waiting: dict[str, _Live] = {}
        self._running: dict[str, _Live] = {}
        self._ended: list[_Live] = []
        self._stats = EngineStats()
        self._paused = False
        self.closed = False
        self.seen: list[Request] = []

    def add_request(self, request: Request) -> None:
        if self._max_queue and len(self._waiting) >= self._max_queue:
            raise AdmissionError("the queue is full", retry_after_s=2.0)
        self.seen.append(request)
        live = _Live(request, list(request.prompt_token_ids), request.arrival_s)
        live.script = list(self._script.get(tuple(request.prompt_token_ids), ()))
        self._waiting[request.request_id] = live
        self._stats.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            live = self._waiting.pop(request_id, None)
            if live is None:
                live = self._running.pop(request_id, None)
                if live is not None:
                    self.free_blocks += 1
            if live is not None:
                self._ended.append(live)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def step(self, block: bool = True) -> list[TokenOutput]:
        if self._step_s:
            time.sleep(self._step_s)
        outputs = [self._output(live, [], FinishReason.ABORT) for live in self._ended]
        self._ended.clear()
        if self._paused:
            return outputs
        self._stats.steps += 1
        if self._fail_at is not None and self._stats.steps >= self._fail_at:
            raise EngineDead("the fake engine was told to fail")
        while self._waiting and len(self._running) < self._max_seqs and self.free_blocks:
            request_id = next(iter(self._waiting))
            self._running[request_id] = self._waiting.pop(request_id)
            self.free_blocks -= 1
        for live in list(self._running.values()):
            outputs.append(self._advance(live))
        return outputs

    def _advance(self, live: _Live) -> TokenOutput:
        request, new, reason, stop_reason = live.request, [], None, None
        params = request.params
        logprobs: list[TokenLogprob] = []
        stops = set(params.stop_token_ids)
        stops |= set() if params.ignore_eos else set(request.eos_token_ids)
        done = len(live.tokens) - len(request.prompt_token_ids)
        for _ in range(self._per_step):
            token = live.script.pop(0) if live.script else self._next(request, live.tokens)
            live.tokens.append(token)
            new.append(token)
            done += 1
            if params.logprobs is not None:
                count = 265 if params.logprobs == -1 else params.logprobs
                top = tuple(((token + i) % 265, -0.5 - i) for i in range(count))
                logprobs.append(TokenLogprob(token, -0.5, 1, top))
            if token in stops and done >= params.min_tokens:
                reason = FinishReason.STOP
                stop_reason = None if token in request.eos_token_ids else token
            elif params.max_tokens is not None and done >= params.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        output = self._output(live, new, reason)
        output.stop_reason = stop_reason
        output.logprobs = logprobs or None
        if done == len(new) and params.prompt_logprobs is not None:
            ids = request.prompt_token_ids
            output.prompt_logprobs = [None] + [
                TokenLogprob(t, -1.0, 2, ((1, -0.25),) * (params.prompt_logprobs != 0))
                for t in ids[1:]
            ]
        self._stats.generation_tokens += len(new)
        if reason is not None:
            del self._running[request.request_id]
            self.free_blocks += 1
        return output

    def _output(self, live: _Live, tokens: list[int], reason: FinishReason | None) -> TokenOutput:
        now = time.monotonic()
        if tokens and live.first_token_s is None:
            live.first_token_s = now - live.arrival_s
        if reason is not None:
            finished = self._stats.finished
            finished[reason.value] = finished.get(reason.value, 0) + 1
        prompt = len(live.request.prompt_token_ids)
        return TokenOutput(
            live.request.request_id,
            tokens,
            finish_reason=reason,
            num_prompt_tokens=prompt,
            num_output_tokens=len(live.tokens) - prompt,
            num_cached_tokens=live.cached,
            queued_s=0.0,
            first_token_s=live.first_token_s,
            now_s=now,
        )

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = len(self._waiting)
        self._stats.kv_usage = 1 - self.free_blocks / self.num_blocks
        return self._stats

    def pause(self, all: bool = False) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def reset_prefix_cache(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeParts:
    """Like `EngineParts`."""

    engine: Any
    tokenizer: Any
    info: ModelInfo
    explain: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        self.engine.close()


def make_info(max_model_len: int = 256, **changes: Any) -> ModelInfo:
    tokenizer = ByteTokenizer()
    facts: dict[str, Any] = {
        "name": "fake",
        "served_names": ("fake",),
        "max_model_len": max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_ids": tokenizer.eos_token_ids,
    }
    return ModelInfo(**{**facts, **changes})


def make_parts(tokenizer: Any = None, info: ModelInfo | None = None, **engine: Any) -> FakeParts:
    return FakeParts(FakeEngine(**engine), tokenizer or ByteTokenizer(), info or make_info())


BUILDER = "tests.support.fake_engine:build_in_child"


def build_in_child(argument: Mapping[str, Any], progress: Callable[[str, int, int], None]) -> Any:
    """The builder of process tests: `ProcessLink(None, builder=BUILDER)`."""
    progress("loading", 1, 2)
    if argument.get("fail"):
        from cardcage.core.errors import ModelError

        raise ModelError(argument["fail"])
    time.sleep(argument.get("delay_s", 0.0))
    progress("loading", 2, 2)
    return make_parts(**argument.get("engine", {}))
