"""From what a caller asks to what the engine runs: checks, defaults, token ids, seeds.

One path for every frontend and for the offline class. A mistake is refused here, before
admission, with the name of the field. Nothing is clamped in silence but `max_tokens`, which
never exceeds what the context leaves.

Source: sampling ranges and bad-word rules are those of vLLM 0.30, restated.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cardcage.core.contracts import Tokenizer
from cardcage.core.errors import ContextTooLong, InvalidRequest
from cardcage.core.text.detokenizer import Detokenizer, Vocabulary
from cardcage.core.text.renderer import Renderer
from cardcage.core.types import GenRequest, Request, SamplingParams, shown

MAX_BIAS = 100.0
MAX_BAD_WORD_TOKENS = 128
MAX_BAD_WORDS = 1024
MAX_WORD_CHARS = 1 << 16  # of one stop string or bad word
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What intake must know of the model; the fields are those of `ModelInfo`."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    scheduler_policy: str = "fcfs"
    takes_ext: bool = False
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server refuses; None means no limit."""

    max_stop: int | None = None
    max_n: int | None = None
    max_prompt_chars: int = 1 << 20


@dataclass(slots=True)
class Prepared:
    """A checked request. `children` are the engine's requests, one per sample.

    `score_only`: the caller wants no new token (max_tokens 0); the engine still samples one at
    the end of prefill, which is dropped. It runs only when prompt log-probabilities are wanted.
    """

    request_id: str
    prompt_text: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[Request]
    score_only: bool = False

    @property
    def needs_engine(self) -> bool:
        return not self.score_only or self.params.prompt_logprobs is not None


class Intake:
    """Turns `GenRequest`s into `Prepared` ones. Thread-safe.

    Args:
        facts: a `ModelFacts` or `ModelInfo`.
        tokenizer: None when the engine runs on token ids alone.
        renderer: None when the model has no chat template.
        draw_seed: gives 64-bit seeds for requests that bring none.
    """

    def __init__(
        self,
        facts: Any,
        tokenizer: Tokenizer | None,
        renderer: Renderer | None = None,
        *,
        limits: Limits | None = None,
        draw_seed: Callable[[], int] | None = None,
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
        self.renderer = renderer
        self.limits = limits or Limits()
        self._draw_seed = draw_seed or (lambda: secrets.randbits(63))

    @classmethod
    def for_model(
        cls,
        facts: Any,
        tokenizer: Tokenizer | None,
        *,
        limits: Limits | None = None,
        seed: int | None = None,
    ) -> Intake:
        """An intake with the tokenizer's own chat template.

        `seed` makes the drawn seeds repeat from run to run, in order of arrival.
        """
        chars = max(16 * int(facts.max_model_len), 1 << 20)
        limits = replace(limits or Limits(), max_prompt_chars=chars)
        renderer = None
        if tokenizer is not None and tokenizer.chat_template:
            renderer = Renderer(
                tokenizer.chat_template, tokenizer.special_tokens(), max_chars=chars
            )
        draw = None
        if seed is not None:
            import random

            source = random.Random(seed)
            draw = lambda: source.getrandbits(63)  # noqa: E731
        return cls(facts, tokenizer, renderer, limits=limits, draw_seed=draw)

    # ---- prompt

    def render(self, request: GenRequest) -> tuple[str | None, list[int]]:
        """The prompt as text (None when ids were given) and as ids, cut when asked to be."""
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", "prompt")
        text: str | None
        if request.messages is not None:
            text = self._render_chat(request)
            ids = self._encode(text, bool(request.add_special_tokens), "messages")
        elif isinstance(request.prompt, str):
            text = request.prompt
            ids = self._encode(text, request.add_special_tokens is not False, "prompt")
        else:
            text = None
            ids = self._check_ids(request.prompt or ())
        return text, self._truncate(ids, request)

    def _render_chat(self, request: GenRequest) -> str:
        if self.tokenizer is None:
            raise InvalidRequest(
                "messages need a tokenizer, and this engine runs without one: send token ids",
                "messages",
            )
        if self.renderer is None:
            raise InvalidRequest(
                "this model has no chat template: use the completions API, or give the model a "
                "chat_template in its tokenizer files",
                "messages",
            )
        return self.renderer.render(
            request.messages or (),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.template_kwargs,
        )

    def _encode(self, text: str, special: bool, param: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest(
                "text prompts need a tokenizer, and this engine runs without one: send token ids",
                param,
            )
        if len(text) > self.limits.max_prompt_chars:
            raise ContextTooLong(
                f"{param} has {len(text)} characters; at most {self.limits.max_prompt_chars} are "
                f"tokenized for a context of {self.facts.max_model_len} tokens",
                param,
            )
        try:
            return list(self.tokenizer.encode(text, special))
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} holds half a surrogate pair at character {error.start}: send valid "
                "Unicode",
                param,
            ) from error

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        out = list(ids)
        vocab = self.facts.vocab_size
        for token in out:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise InvalidRequest(
                    f"prompt token ids must be integers in [0, {vocab}), got {shown(token, 40)}",
                    "prompt",
                )
        return out

    def _truncate(self, ids: list[int], request: GenRequest) -> list[int]:
        if request.truncation_side not in ("left", "right"):
            raise InvalidRequest(
                f"truncation_side must be left or right, got {shown(request.truncation_side)!r}",
                "truncation_side",
            )
        keep = request.truncate_prompt_tokens
        if keep is None:
            return ids
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < -1 or keep == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {shown(keep)}",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = self.facts.max_model_len - 1
        elif keep >= self.facts.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be below the context of {self.facts.max_model_len} "
                f"tokens, got {shown(keep)}",
                "truncate_prompt_tokens",
            )
        return ids[-keep:] if request.truncation_side == "left" else ids[:keep]

    # ---- parameters

    def prepare(self, request: GenRequest) -> Prepared:
        """Check everything and make the engine's requests.

        Raises:
            InvalidRequest, ContextTooLong: with the field's name in `param`.
        """
        params = self._resolve(request)
        text, ids = self.render(request)
        param = "messages" if request.messages is not None else "prompt"
        if not ids:
            raise InvalidRequest(f"{param} has no tokens: send at least one", param)
        room = self.facts.max_model_len - len(ids)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens and this model's context is "
                f"{self.facts.max_model_len} tokens, of which one must be left for the answer: "
                "send a shorter prompt",
                param,
            )
        params, score_only = self._limit(params, room, request.default_max_tokens)
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        children = self._children(request, request_id, ids, params, score_only)
        return Prepared(request_id, text, ids, params, children, score_only)

    def _resolve(self, request: GenRequest) -> SamplingParams:
        """The caller's parameters over the model's generation defaults, checked."""
        given = request.params
        if isinstance(given, SamplingParams):
            params = given
        elif not isinstance(given, Mapping):
            raise InvalidRequest(
                f"sampling params must be a SamplingParams, got {type(given).__name__}", "params"
            )
        else:
            values = dict(given)
            for name in values:
                if name not in SamplingParams.names():
                    raise InvalidRequest(f"there is no sampling parameter {name!r}", "params")
            for name in _DEFAULTED:
                default = self.facts.generation_defaults.get(name)
                if default is not None:
                    values.setdefault(name, default)
            limit = self.facts.generation_defaults.get("max_new_tokens")
            values.setdefault("max_tokens", request.default_max_tokens or limit)
            params = SamplingParams(**values)
        if self.facts.scheduler_policy != "priority" and request.priority:
            raise InvalidRequest(
                f"priority {shown(request.priority)} has no effect: this server schedules "
                "first come, first served (start it with scheduler.policy=priority)",
                "priority",
            )
        if not -(1 << 63) <= request.priority < 1 << 63:
            raise InvalidRequest("priority must be a signed 64-bit integer", "priority")
        if params.ext and not self.facts.takes_ext:
            raise InvalidRequest(
                f"ext ({', '.join(sorted(map(shown, params.ext)))}) would be read by nobody: "
                "sampling.use names no plugin",
                "ext",
            )
        self._check_sizes(params)
        self._check_vocabulary(params)
        if params.bad_words:
            params = params.with_(
                bad_words_ids=params.bad_words_ids + self._bad_words(params.bad_words)
            )
        if params.logit_bias is not None:
            clamped = {k: max(-MAX_BIAS, min(MAX_BIAS, v)) for k, v in params.logit_bias.items()}
            params = params.with_(logit_bias=clamped)
        return params

    def _check_sizes(self, params: SamplingParams) -> None:
        limits = self.limits
        if limits.max_n is not None and params.n > limits.max_n:
            raise InvalidRequest(f"n must be at most {limits.max_n}, got {params.n}", "n")
        if limits.max_stop is not None and len(params.stop) > limits.max_stop:
            raise InvalidRequest(
                f"stop must have at most {limits.max_stop} strings, got {len(params.stop)}", "stop"
            )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(
                f"{name} needs a tokenizer, and this engine runs without one: use token ids", name
            )
        if len(params.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words must have at most {MAX_BAD_WORDS} words, got {len(params.bad_words)}",
                "bad_words",
            )
        for name, words in (("stop", params.stop), ("bad_words", params.bad_words)):
            longest = max(map(len, words), default=0)
            if longest > MAX_WORD_CHARS:
                raise InvalidRequest(
                    f"{name} must have at most {MAX_WORD_CHARS} characters, got {longest}", name
                )
        if params.stop and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize=true", "stop")
        top = self.facts.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is None or top == -1:
                continue
            if value == -1 or value > top:
                raise InvalidRequest(
                    f"{name} must be at most {top}, got {value} (sampling.max_logprobs sets the "
                    "limit)",
                    name,
                )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        vocab = self.facts.vocab_size
        lists: tuple[tuple[str, Sequence[int]], ...] = (
            ("logit_bias", tuple(params.logit_bias or ())),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
        )
        for name, ids in lists:
            for token in ids:
                if token >= vocab:
                    raise InvalidRequest(
                        f"{name} holds token id {token}, outside the vocabulary of {vocab} tokens",
                        name,
                    )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word tokenized bare and after a space.

        The spaced form is kept only when it starts differently and has the same length.
        """
        assert self.tokenizer is not None
        out: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.tokenizer.encode(word.lstrip(), False)) if word.strip() else ()
            if not bare or len(bare) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words holds {word[:40]!r}, which is {len(bare)} tokens; allowed are 1 "
                    f"to {MAX_BAD_WORD_TOKENS}",
                    "bad_words",
                )
            spaced = tuple(self.tokenizer.encode(" " + word.lstrip(), False))
            out.append(bare)
            if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                out.append(spaced)
        return tuple(out)

    def _limit(
        self, params: SamplingParams, room: int, default: int | None
    ) -> tuple[SamplingParams, bool]:
        """`max_tokens` within the context, and whether no token is wanted at all."""
        wanted = params.max_tokens if params.max_tokens is not None else (default or room)
        if wanted == 0:
            return params, True
        allowed = min(wanted, room)
        if params.min_tokens > allowed:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but the context leaves {allowed} tokens",
                "min_tokens",
            )
        return params.with_(max_tokens=allowed), False

    def _children(
        self,
        request: GenRequest,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        score_only: bool,
    ) -> list[Request]:
        seed = params.seed if params.seed is not None else self._draw_seed()
        root_key = salt_key(request.cache_salt)
        # The engine sees token-level parameters of one sample; stop strings stay here.
        single = params.with_(n=1, stop=(), max_tokens=1 if score_only else params.max_tokens)
        without_prompt = single.with_(prompt_logprobs=None)
        count = 1 if score_only else params.n
        return [
            Request(
                request_id=f"{request_id}-{i}" if count > 1 else request_id,
                prompt_token_ids=ids,
                params=single if i == 0 else without_prompt,
                eos_token_ids=tuple(self.facts.eos_token_ids),
                priority=request.priority,
                seed=_signed64(seed + i),
                root_key=root_key,
                session_id=request.session_id,
            )
            for i in range(count)
        ]

    # ---- text of one sample

    def detokenizer(self, prompt_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        """The text state of one sample; None when no text is wanted or there is no tokenizer."""
        if self.vocabulary is None or not params.detokenize:
            return None
        return Detokenizer(
            self.vocabulary,
            prompt_ids,
            stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
            space_special=params.spaces_between_special_tokens,
        )


def _signed64(value: int) -> int:
    """Wrap into the range of a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def salt_key(salt: str | None) -> bytes:
    """A tenant's salt as a tagged, length-prefixed field of the prefix-cache root.

    Raises:
        InvalidRequest: empty, over 128 characters, or holding a path-like character.
    """
    if salt is None:
        return b""
    if not isinstance(salt, str) or not 0 < len(salt) <= 128 or any(c in "@/\\\0" for c in salt):
        raise InvalidRequest(
            "cache_salt must be 1 to 128 characters without @, /, \\ and NUL", "cache_salt"
        )
    data = salt.encode("utf-8", "surrogatepass")
    return b"salt" + len(data).to_bytes(4, "little") + data
