"""The page a plugin author reads: per kind one frozen Caps, one frozen Need, and Protocols.

A *declaration* (the object an entry point names) is a light class with `name`, `api`, `caps`,
`options` and `build`. The resolver compares a `Need` with `Caps` field by field; only the
winner's implementation is imported, by its `build`. Objects that `build` returns are then held
and called directly: nothing here is looked up during a step.

Shape letters: T tokens in a step, R requests in a step, H query heads, K KV heads, D head size,
V vocabulary, N blocks, S block size. This module imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from cardcage.core.model_desc import ModelDesc
from cardcage.core.types import (
    EngineStats,
    GenRequest,
    KVCapacity,
    KVGroupSpec,
    SamplingParams,
    StepPlan,
    StepResult,
    TextDelta,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    import logging

    import torch

# Contract versions. A minor adds fields with defaults; a major may remove.
API: dict[str, str] = {
    "attention": "1.0",
    "blocks": "1.0",
    "executors": "1.0",
    "frontends": "1.0",
    "grammars": "1.0",
    "hardware": "1.0",
    "hooks": "1.0",
    "kv_kinds": "1.0",
    "kv_tiers": "1.0",
    "linear": "1.0",
    "loaders": "1.0",
    "metrics": "1.0",
    "models": "1.0",
    "parsers": "1.0",
    "quant": "1.0",
    "sampling": "1.0",
    "speculators": "1.0",
    "tokenizers": "1.0",
}
KINDS: tuple[str, ...] = tuple(sorted(API))


# ---- constraints a Caps field may hold (besides None = any, and a frozenset of allowed values)


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The need must be >= `low` (numbers or tuples such as a compute capability)."""

    low: Any

    def reason(self, name: str, value: Any) -> str | None:
        return None if value >= self.low else f"{name} {value} is below {self.low}"


@dataclass(frozen=True, slots=True)
class Between:
    """The need must lie in [low, high]."""

    low: Any
    high: Any

    def reason(self, name: str, value: Any) -> str | None:
        if self.low <= value <= self.high:
            return None
        return f"{name} {value} is not between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """The need must be a multiple of `step`, up to `high` when given."""

    step: int
    high: int | None = None

    def reason(self, name: str, value: Any) -> str | None:
        if value % self.step == 0 and (self.high is None or value <= self.high):
            return None
        upto = "" if self.high is None else f" up to {self.high}"
        return f"{name} {value} is not a multiple of {self.step}{upto}"


@dataclass(frozen=True, slots=True)
class Exclude:
    """A combination that does not work: every field of `when` equal -> refused for `reason`."""

    when: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What every kind's capabilities share. None in a field means: any value.

    `requires` maps a distribution (PEP 508 name, optional version) to the command that installs
    it. `priority` bands: 80 tuned for this chip, 50 native, 30 portable, 10 reference.
    """

    requires: Mapping[str, str] = field(default_factory=dict)
    priority: int = 30
    excludes: tuple[Exclude, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is asked of a kind. Field names equal those of its Caps.

    `features` in a Need is a set that must be contained in the Caps' `features`. A None in a
    Need field means: does not matter.
    """


@runtime_checkable
class Declaration(Protocol):
    """What an entry point of group `cardcage.<kind>` names: a class, instantiated with no args.

    Optional attributes: `options` (a pydantic model class with extra="forbid"), `roles`
    (frozenset of frontend, core, worker, render), `metrics` (tuple of MetricDecl), `activation`
    ("available" or "opt-in"), `reasons_against(need) -> list[str]` (pure, never raises).
    """

    name: ClassVar[str]
    api: ClassVar[str]
    caps: ClassVar[Caps]

    def build(self, need: Any, ctx: Any, options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class MetricDecl:
    """A metric that a plugin declares up front. type: counter, gauge or histogram."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a built plugin may know of the host. Read-only; never a mutable host object.

    `hardware` is the chosen platform (None before it is chosen), `config` the resolved config as
    plain nested dictionaries, `clock` returns monotonic seconds, `resolve` builds another plugin
    by kind and need (only for plugins that compose others, such as executors).
    """

    logger: logging.Logger
    config: Mapping[str, Any]
    clock: Callable[[], float]
    data_dir: Path
    hardware: Hardware | None = None
    resolve: Callable[..., Any] | None = None
    rank: int = 0
    world_size: int = 1
    extras: Mapping[str, Any] = field(default_factory=dict)


# ---- hardware --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HardwareCaps(Caps):
    """device_type: what torch calls the device ("cpu", "cuda", "xpu", "null")."""

    device_type: str = "cpu"
    vendor: str = ""
    features: frozenset[str] = frozenset()  # triton, graphs, streams, pinned, p2p ...


@dataclass(frozen=True, kw_only=True)
class HardwareNeed(Need):
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DetectResult:
    """score 0 = no such device here. `reason` says why, or what was found. No device context."""

    score: int
    reason: str
    num_devices: int = 0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """arch is comparable, e.g. (9, 0); () for hosts. Memory in bytes."""

    name: str
    device_type: str
    arch: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    num_sms: int
    features: frozenset[str]


@dataclass(frozen=True, slots=True)
class Default:
    """A default that a platform proposes for a config path, with its reason."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A config value that cannot work on this platform, and what to do instead."""

    path: str
    reason: str
    fix: str | None = None


class HardwareDeclaration(Protocol):
    """The declaration itself answers detect(): cheap, without creating a device context."""

    def detect(self) -> DetectResult: ...


class Hardware(Protocol):
    """A platform in use. Pure queries; never edits the config; knows no model."""

    name: str
    device_type: str

    def device(self) -> torch.device: ...
    def facts(self) -> DeviceFacts: ...
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device now."""

    def dtypes(self) -> tuple[str, ...]:
        """Usable dtypes by torch name, preferred first."""

    def synchronize(self) -> None: ...
    def event(self) -> Any:
        """An event with record()/synchronize()/query(); a no-op object on hosts."""

    def stream(self) -> Any:
        """A side stream usable as a context manager; a null context on hosts."""

    def candidates(self, kind: str) -> tuple[str, ...]:
        """Plugin names of a kind in order of preference on this platform; () for no opinion."""

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Default]: ...
    def constraints(self, config: Mapping[str, Any]) -> list[Violation]: ...
    def worker_env(self) -> dict[str, str]: ...
    def close(self) -> None: ...


# ---- attention -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionCaps(Caps):
    """Sets (or constraints) for each field of the need. features: window, softcap, sinks,
    prefix (cached prefix and chunked prefill), mixed (prefill and decode in one call),
    lse, graphs, deterministic, non_causal."""

    op: Any = frozenset({"paged"})
    device_type: Any = None
    arch: Any = None
    dtype: Any = None
    kv_format: Any = frozenset({"auto"})
    head_size: Any = None
    value_size: Any = None
    block_size: Any = None
    group_size: Any = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class AttentionNeed(Need):
    """One distinct kind of attention layer. Layers with equal needs share backend and planner.

    dtype is torch's name ("bfloat16"). `kv_format` "auto" stores K and V in `dtype`. window 0 =
    none, else exactly `window` visible keys including the query's own. softcap 0 = none.
    """

    op: str = "paged"
    device_type: str = "cpu"
    arch: tuple[int, ...] = ()
    dtype: str = "float32"
    kv_format: str = "auto"
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size: int = 64
    value_size: int = 64
    block_size: int = 16
    group_size: int = 1
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 1.0
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KVPart:
    """One tensor of a layer's cache inside a block, e.g. ("k", (K, S, D), "bfloat16").

    The host makes a strided view [N, *shape] per layer and part over the block pool; the
    strides of the leading (block) dimension come from the pool, so never assume contiguity
    between blocks. `shape` is contiguous within the block.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class StepMeta:
    """Index tensors of one step for one KV group. All on the device; host copies where named.

    query_start_loc int32 [R+1]; seq_lens int32 [R] (computed + rows of this step); block_table
    int32 [R, max_blocks]; slot_mapping int64 [T] (block * S + offset; -1 = do not write).
    Row t of request r is at position seq_lens[r] - query_len(r) + local index. Decode rows come
    first: `num_decodes` requests with one row each.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_host: Sequence[int]
    seq_lens_host: Sequence[int]


class AttentionBackend(Protocol):
    """Built once per distinct `AttentionNeed`, in the worker, when the model is built."""

    def kv_parts(self) -> tuple[KVPart, ...]:
        """The cache tensors of one layer in one block, in the order `forward` gets them."""

    def plan(self, meta: StepMeta) -> Any:
        """Once per step and KV group, before the layers. May not synchronise with the device."""

    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: Any
    ) -> None:
        """Store k [T, K, D] and v [T, K, Dv] (after RoPE) at the plan's slot_mapping."""

    def forward(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: Any,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, Dv], reading every key from the cache (write comes first).

        `lse` float32 [H, T], natural log, is filled when given. Masks by position before using
        a loaded value: unused slots may hold NaN. Called inside the step: no host sync.
        """


# ---- linear kernels and quantizers -------------------------------------------------------------


@dataclass(slots=True)
class QuantTensor:
    """One logical weight [N, K] in some encoding: the canonical record of quant.md 1.1.

    `encoding` names what the numbers mean ("none", "gguf:q4_1", ...), `parts` the tensors (an
    unquantized weight is {"weight": [N, K]}), `decode(record) -> float32 [N, K]` the exact
    values, `decode_rows(record, ids) -> float32 [n, K]` those of some rows (embeddings).
    """

    encoding: str
    shape: tuple[int, int]
    parts: dict[str, torch.Tensor]
    decode: Callable[[QuantTensor], torch.Tensor]
    decode_rows: Callable[[QuantTensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearCaps(Caps):
    """encoding: the QuantTensor encodings it runs; layer: linear, embedding, moe."""

    encoding: Any = None
    layer: Any = frozenset({"linear"})
    device_type: Any = None
    arch: Any = None
    dtype: Any = None
    in_features: Any = None
    out_features: Any = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class LinearNeed(Need):
    encoding: str = "none"
    layer: str = "linear"
    device_type: str = "cpu"
    arch: tuple[int, ...] = ()
    dtype: str = "float32"
    in_features: int = 0
    out_features: int = 0
    features: frozenset[str] = frozenset()


class LinearKernel(Protocol):
    """Runs y = x W^T + b. Built once per distinct need, `prepare`d once per weight.

    Optional: `run_wide(handle, x) -> float32 [T, N]`, the product (no bias) without rounding it
    to x's dtype. The head uses it; without it, its logits are rounded.
    """

    layout_id: str

    def prepare(self, record: QuantTensor, device: torch.device) -> Any:
        """Repack for the device; deterministic; may drop the record's parts. Returns a handle."""

    def run(self, handle: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] -> [T, N] in x's dtype. No host sync."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A checkpoint tensor before it is read. dtype is torch's name, or "packed" when `encoding`
    names a packed format; `shape` is the logical shape; `nbytes` the stored size."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    encoding: str = "none"


@dataclass(frozen=True, slots=True)
class LinearDesc:
    """A weight that the model asks for. `name` is the checkpoint prefix (no ".weight")."""

    name: str
    layer: str  # linear, embedding, moe
    out_features: int
    in_features: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantCaps(Caps):
    """methods: the checkpoint `quant_method` names (or loader encodings) it answers to."""

    methods: Any = frozenset({"none"})
    device_type: Any = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class QuantNeed(Need):
    methods: str = "none"
    device_type: str = "cpu"
    features: frozenset[str] = frozenset()


class Quantizer(Protocol):
    """Turns checkpoint tensors of one layer into records. Pure; touches no module."""

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """Names of the checkpoint tensors that make up this weight (all required)."""

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, torch.Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """The canonical record from the tensors that `slots` named, still on the host.

        `dtype` is the model's compute dtype: an unquantized weight is cast to it here."""


# ---- loaders and tokenizers --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RefMatch:
    """A loader recognises a model reference. The highest score wins; `reason` is for `why`."""

    score: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoaderCaps(Caps):
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class LoaderNeed(Need):
    features: frozenset[str] = frozenset()


class WeightSource(Protocol):
    """Checkpoint tensors by Hugging Face name.

    A source that makes its tensors up (random weights) may have a method
    `expect(shapes: Mapping[str, tuple[int, ...]], device, dtype)`: it is called with everything
    the model needs before `index`, and `read` may then return tensors on that device.
    """

    def index(self) -> Mapping[str, TensorMeta]:
        """Cheap; reads headers only. Raises CheckpointError for truncated or corrupt files."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host, memory-mapped where possible (treat as read-only). Packed
        encodings come as uint8 [N, bytes per row]."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved model reference: everything about the model but its weights' bytes.

    `config` is a Hugging Face style config dictionary (made up from metadata for GGUF).
    `quant_method` is "none" or the name quantizers answer to ("gguf", ...). `tokenizer` names
    the tokenizers plugin and what it needs ({"use": "hf", "path": ...} or
    {"use": "gguf", "metadata": {...}}), {} for none. `revision` is a digest of the content
    that matters to caches. `open_weights()` gives the tensors.
    """

    ref: str
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    quant_method: str
    revision: str
    open_weights: Callable[[], WeightSource]
    name: str = ""  # the name to serve under by default


class Loader(Protocol):
    """Built after `recognise` (a method of the declaration, which may stat files) won."""

    def open(
        self, ref: str, progress: Callable[[str, int, int], None] | None = None
    ) -> ModelSource:
        """Fetch what is missing (with progress(what, done, total)), verify, read headers."""


class LoaderDeclaration(Protocol):
    def recognise(self, ref: str) -> RefMatch | None: ...


@dataclass(frozen=True, kw_only=True)
class TokenizerCaps(Caps):
    source: Any = None


@dataclass(frozen=True, kw_only=True)
class TokenizerNeed(Need):
    source: str = "hf"


class Tokenizer(Protocol):
    """Text <-> token ids. Thread-safe. `chat_template` is jinja source or None."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that this token stands for (its UTF-8 text for special tokens)."""

    def token_str(self, token_id: int) -> str:
        """The vocabulary's own spelling."""

    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token, ... as text, for chat templates."""


# ---- models and blocks -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelCaps(Caps):
    architecture: Any = None


@dataclass(frozen=True, kw_only=True)
class ModelNeed(Need):
    architecture: str = ""


class ModelPlugin(Protocol):
    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """Data only. Raises UnsupportedModel naming the config key that it cannot honour."""


@dataclass(frozen=True, kw_only=True)
class BlockCaps(Caps):
    device_type: Any = None


@dataclass(frozen=True, kw_only=True)
class BlockNeed(Need):
    device_type: str = "cpu"


class BlockPlugin(Protocol):
    """`make(node, ctx)` returns a Block; `ctx` is `cardcage.core.runtime.layers.BuildContext`."""

    def make(self, node: Any, ctx: Any) -> Any: ...


# ---- cache kinds -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KVKindCaps(Caps):
    pass


@dataclass(frozen=True, kw_only=True)
class KVKindNeed(Need):
    pass


class KVKind(Protocol):
    """Rules of one kind of cache layer, in blocks. Pure Python; called by the scheduler.

    All counts are tokens unless named blocks. `S` is the group's block size.
    """

    def num_blocks(self, num_tokens: int) -> int:
        """Logical blocks that a request with `num_tokens` tokens spans (freed ones included)."""

    def first_live_block(self, num_confirmed: int) -> int:
        """Blocks before this index are no longer read once `num_confirmed` tokens are done."""

    def max_live_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Most blocks held at once while reaching `num_tokens`, `in_flight` tokens a step."""

    def find_hit(self, is_cached: Callable[[int], bool], limit_blocks: int) -> int:
        """Longest usable prefix in blocks, at most `limit_blocks`; `is_cached(i)` tells
        whether logical block i is in the prefix cache."""

    def cacheable(self) -> bool: ...


# ---- executors ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExecutorCaps(Caps):
    """features: drafts (verifies the drafts that plans carry)."""

    device_type: Any = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ExecutorNeed(Need):
    device_type: str = "cpu"
    features: frozenset[str] = frozenset()


class StepTicket(Protocol):
    """A step in flight."""

    def done(self) -> bool: ...
    def wait(self) -> StepResult:
        """Blocks until the result is on the host. Raises ExecutionError if the step failed."""


class Executor(Protocol):
    """Runs step plans on a model. `build` returns it unloaded; `load` does the long work."""

    max_in_flight: int

    def load(
        self, source: ModelSource, progress: Callable[[str, int, int], None] | None = None
    ) -> KVCapacity: ...
    def execute(self, plan: StepPlan) -> StepTicket:
        """Never blocks on the device. Plans are executed in the order given."""

    def reset(self) -> None:
        """Forget all slots after a failed step; weights and pool stay."""

    def explain(self) -> dict[str, Any]:
        """What was chosen inside (decisions by layer kind, bytes, dtypes), JSON-able."""

    def close(self) -> None: ...


# ---- sampling (logits plugins) -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplingCaps(Caps):
    """draft_rows: it can edit rows that follow drafts; if not, no speculator runs beside it."""

    draft_rows: bool = True
    device_type: Any = None


@dataclass(frozen=True, kw_only=True)
class SamplingNeed(Need):
    device_type: str = "cpu"


@dataclass(slots=True)
class SampleRows:
    """The rows handed to a logits plugin. slots/local/positions int64 [n] on the device;
    `history(i)` is the committed and drafted token ids before row i's position."""

    slots: torch.Tensor
    local: torch.Tensor
    positions: torch.Tensor
    history: Callable[[int], torch.Tensor]


class LogitsPlugin(Protocol):
    """Edits logits rows in place. Keeps no state by batch index and none advanced in apply.

    `order` is its place between the built-in stages (`runtime.sampler` numbers them; 9 is usual);
    `argmax_invariant` says that greedy rows may skip it.
    """

    order: float
    argmax_invariant: bool

    def validate(self, params: SamplingParams) -> str | None: ...
    def admit(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int]) -> bool: ...
    def release(self, slot: int) -> None: ...
    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None: ...


# ---- frontends ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FrontendCaps(Caps):
    features: frozenset[str] = frozenset()  # http, grpc, ...


@dataclass(frozen=True, kw_only=True)
class FrontendNeed(Need):
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP route of a frontend. auth: "required" or "public".

    `path` may hold `{name}` segments. `handler` is an ASGI application, called as
    `handler(scope, receive, send)`; the host has checked authorisation and counts the bytes of
    the body. Routes of all frontends share one table: the same method and path twice is an
    error at start-up.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    auth: str = "required"


class GenStream(Protocol):
    """The answer to one `GenRequest`: an async iterator of deltas, merged while nobody reads.

    Iteration ends after every sample has finished. It raises EngineDead or ExecutionError when
    the engine failed. `aclose()` aborts what still runs; calling it twice is harmless.
    """

    request_id: str
    prompt_text: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprob | None] | None
    params: SamplingParams

    @property
    def usage(self) -> Usage: ...
    def __aiter__(self) -> GenStream: ...
    async def __anext__(self) -> TextDelta: ...
    async def aclose(self) -> None: ...
    def cancel(self) -> None:
        """Abort at once, from the event loop; a pending `__anext__` ends the iteration."""


class EngineClient(Protocol):
    """The one object that a frontend gets. All methods belong to the client's event loop."""

    info: Any  # ModelInfo; raises AdmissionError while the engine starts
    tokenizer: Tokenizer | None
    max_prompt_chars: int

    async def prepare(self, request: GenRequest) -> Any:
        """Render, tokenize and check. Raises InvalidRequest or ContextTooLong with `param`."""

    async def start_stream(self, prepared: Any) -> GenStream:
        """Admit a prepared request. Raises AdmissionError before any output."""

    async def submit(self, request: GenRequest) -> GenStream:
        """`prepare` and `start_stream`."""

    async def render(self, request: GenRequest) -> tuple[str | None, list[int]]:
        """The prompt as text (None when ids were given) and ids, not submitted."""

    async def abort(self, request_ids: Iterable[str]) -> None: ...
    def health(self) -> tuple[str, str]:
        """(state, reason); state is "starting", "ok", "draining" or "dead"."""

    async def stats(self) -> EngineStats: ...
    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text (undecodable bytes replaced) and as raw bytes."""

    def token_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token, the character of the decoded text at which its own text starts."""

    async def metrics_text(self) -> bytes:
        """Engine metrics in Prometheus text format."""


class Frontend(Protocol):
    """Gets one object, the async client, and nothing else."""

    def routes(self, client: EngineClient) -> list[Route]: ...
    def close(self) -> None: ...


# ---- KV tiers and speculators --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KVTierCaps(Caps):
    medium: str = "host"
    persistent: bool = False
    shared: bool = False
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class KVTierNeed(Need):
    bytes: int = 0
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TierDone:
    """A finished tier job: which keys succeeded, which failed and why."""

    job: int
    ok: tuple[bytes, ...]
    failed: tuple[tuple[bytes, str], ...]
    num_bytes: int
    seconds: float


class KVTier(Protocol):
    """A tier below device memory. Called from one thread; each call well under 100 us."""

    def probe(self, keys: Sequence[bytes]) -> Sequence[str]:
        """HIT, MISS or PENDING per key."""

    def read(self, keys: Sequence[bytes], dst: Sequence[memoryview], deadline_s: float) -> int: ...
    def write(self, keys: Sequence[bytes], src: Sequence[memoryview], deadline_s: float) -> int: ...
    def poll(self) -> list[TierDone]: ...
    def drop(self, keys: Sequence[bytes]) -> None: ...
    def stats(self) -> Mapping[str, float]: ...
    def drain(self, deadline_s: float) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SpeculatorCaps(Caps):
    """dist: how drafts are distributed given the history; only "one_hot" (a fixed guess) runs now.

    max_drafts: a constraint on drafts per request and step. needs_hidden: it reads hidden states
    of the target model, which no executor hands out yet.
    """

    dist: str = "one_hot"
    needs_hidden: bool = False
    max_drafts: Any = None
    device_type: Any = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SpeculatorNeed(Need):
    max_drafts: int = 4
    device_type: str = "cpu"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A request that may have drafts in the step being planned.

    `token_ids` are its prompt and the outputs so far, all of them verified. It is the engine's
    own list: read it during the call, never change it. At least one draft is welcome, at most
    `max_drafts`.
    """

    slot: int
    token_ids: Sequence[int]
    max_drafts: int


class Speculator(Protocol):
    """Proposes drafts, on the host, between two steps. `build` finds `vocab_size` in the
    context's extras.

    Verification, budgets and metrics belong to the core: a wrong draft costs time and changes no
    text. All calls come from the engine's thread and should take microseconds. A call that
    raises, or that returns something other than it says, is handled as `speculator.on_error`
    says: drafting ends for the rest of the run, or the engine does.
    """

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        """A request took a slot: new, or resumed with the outputs it had.

        `token_ids` is the list that later `DraftAsk`s of the slot hand out, and it grows.
        """

    def on_release(self, slot: int, token_ids: Sequence[int]) -> None:
        """The request left the slot (finished, aborted or preempted) with these tokens."""

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Sequence[int]]:
        """Per ask the token ids expected next, best guess first; empty for none."""


# ---- metrics sinks, grammars, parsers, hooks -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MetricsCaps(Caps):
    pass


@dataclass(frozen=True, kw_only=True)
class MetricsNeed(Need):
    pass


class MetricsSink(Protocol):
    def record(self, snapshot: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GrammarCaps(Caps):
    grammar: Any = None


@dataclass(frozen=True, kw_only=True)
class GrammarNeed(Need):
    grammar: str = "json"


@dataclass(frozen=True, kw_only=True)
class ParserCaps(Caps):
    model_type: Any = None


@dataclass(frozen=True, kw_only=True)
class ParserNeed(Need):
    model_type: str = ""


@dataclass(frozen=True, kw_only=True)
class HookCaps(Caps):
    pass


@dataclass(frozen=True, kw_only=True)
class HookNeed(Need):
    pass


CAPS_OF: dict[str, type[Caps]] = {
    "attention": AttentionCaps,
    "blocks": BlockCaps,
    "executors": ExecutorCaps,
    "frontends": FrontendCaps,
    "grammars": GrammarCaps,
    "hardware": HardwareCaps,
    "hooks": HookCaps,
    "kv_kinds": KVKindCaps,
    "kv_tiers": KVTierCaps,
    "linear": LinearCaps,
    "loaders": LoaderCaps,
    "metrics": MetricsCaps,
    "models": ModelCaps,
    "parsers": ParserCaps,
    "quant": QuantCaps,
    "sampling": SamplingCaps,
    "speculators": SpeculatorCaps,
    "tokenizers": TokenizerCaps,
}

__all__ = [n for n in dir() if not n.startswith("_")]
_ = (Iterable, KVGroupSpec)  # re-exported for plugin authors
