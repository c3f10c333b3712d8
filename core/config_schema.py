"""The config tree: one frozen pydantic model per table, every field with range and one line.

Only shapes and limits live here; where values come from is `config`. Unknown keys are errors,
types are strict (no "8" for 8, no true for 1). Plugin options are not here: they belong to the
plugin's own model and live in `[plugin."dist/name"]`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: Any) -> Any:
    """A byte count from a number or text such as "64GiB" or "512MB"; other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or such as 512MiB")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (_UNITS | _BINARY)[unit])


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def one_or_many(value: Any) -> Any:
    """A single word stands for a list of one."""
    return (value,) if isinstance(value, str) else _tuple(value)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
Words = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


class Table(BaseModel):
    """Base of every table: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Choice(Table):
    """How a kind of plugin is chosen."""

    use: str = Field(default="auto", min_length=1, description='"auto", a short name, or dist/name')
    prefer: Names = Field(default=(), description='names in order; a final "auto" allows any other')

    @field_validator("prefer")
    @classmethod
    def _auto_is_last(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "auto" in value[:-1]:
            raise ValueError('"auto" must come last: what follows it would never be asked')
        return value


class Hardware(Choice):
    """The platform that runs the model."""


class AttentionRule(Table):
    """Another attention plugin for some layers."""

    layers: str = Field(min_length=1, description='layer prefix, or "re:" and a pattern')
    use: str = Field(min_length=1, description="plugin name for those layers")


class Attention(Choice):
    """The attention backend."""

    rules: Annotated[tuple[AttentionRule, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="other plugins for named layers; the first match wins"
    )

    @field_validator("rules")
    @classmethod
    def _no_rules_yet(cls, value: tuple[AttentionRule, ...]) -> tuple[AttentionRule, ...]:
        if value:
            raise ValueError("choosing by layer is not supported yet; remove the rules")
        return value


class LinearTable(Choice):
    """The kernels behind matrix products."""


class Quant(Choice):
    """The reader of quantized checkpoints."""


class Executor(Choice):
    """Where and how steps run."""


class LoaderTable(Table):
    """The reader of model references."""

    use: str = Field(default="auto", min_length=1, description='"auto", a short name, or dist/name')


class SpeculatorTable(Table):
    """Drafting of several tokens at a time."""

    use: str | None = Field(default=None, description="plugin name; none = no drafts")
    k: int = Field(default=4, ge=1, le=64, description="drafts per request and step, 1-64")
    adaptive: bool = Field(
        default=True, description="verify only drafts that pay; false = all that are proposed"
    )
    on_error: Literal["disable", "fatal"] = Field(
        default="disable", description="when a drafter fails: go on without drafts, or stop"
    )
    options: dict[str, Any] = Field(default={}, description="the plugin's own options")


class Tier(Table):
    """One level of cache below device memory."""

    use: str | None = Field(default=None, description="name of an installed kv_tiers plugin")
    type: str | None = Field(default=None, description="class in module_path")
    module_path: str | None = Field(default=None, description="Python module that holds the class")
    bytes: Bytes | None = Field(
        default=None, ge=2**20, le=2**53, description="size, at least 1 MiB"
    )
    options: dict[str, Any] = Field(default={}, description="the plugin's own options")

    @model_validator(mode="after")
    def _named_once(self) -> Tier:
        if (self.use is None) == (self.module_path is None):
            raise ValueError("give either use = a plugin's name, or module_path (and type)")
        return self


class KV(Table):
    """The cache of keys and values."""

    block_size: int = Field(default=16, ge=1, le=1024, description="tokens per block, 1-1024")
    bytes: Bytes | None = Field(
        default=None, ge=2**20, le=2**53, description="pool size; none = from utilization"
    )
    utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of device memory for weights and pool, (0, 1]"
    )
    prefix_caching: bool = Field(
        default=True, description="reuse the blocks of shared prompt prefixes"
    )
    format: str = Field(
        default="auto", min_length=1, description='element format; "auto" = the dtype'
    )
    tiers: Annotated[tuple[Tier, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="levels below device memory, nearest first"
    )


class SchedulerTable(Table):
    """What runs in a step."""

    max_num_batched_tokens: int = Field(
        default=8192, ge=1, le=2**20, description="tokens in one step, 1-1048576"
    )
    max_num_seqs: int = Field(default=256, ge=1, le=65536, description="requests at once, 1-65536")
    policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="order of waiting requests"
    )
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        le=2**20,
        description="most prompt tokens of one request in a step; 0 = no limit",
    )
    max_num_queued_reqs: int = Field(
        default=0, ge=0, le=2**31 - 1, description="waiting requests before 503; 0 = no limit"
    )
    max_num_queued_tokens: int = Field(
        default=0, ge=0, le=2**53, description="waiting prompt tokens before 503; 0 = no limit"
    )
    watermark: float = Field(
        default=0.0, ge=0, lt=1, description="share of blocks kept free when admitting, [0, 1)"
    )
    steps_in_flight: int = Field(default=2, ge=1, le=2, description="steps planned ahead, 1-2")


class SamplingTable(Table):
    """How tokens are chosen, beside each request's own parameters."""

    use: Names = Field(default=(), description="logits plugins, in order")
    logprobs_mode: Literal[
        "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    ] = Field(default="raw_logprobs", description="what a request's logprobs show")
    max_logprobs: int = Field(
        default=20, ge=-1, le=2**20, description="most alternatives per token; -1 = the vocabulary"
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto", description="whether the model's sampling defaults apply"
    )


class Server(Table):
    """The serving process."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(
        default=8000, ge=0, le=65535, description="TCP port, 0-65535; 0 = any free one"
    )
    frontends: Names = Field(default=("openai-http",), min_length=1, description="frontend plugins")
    api_keys: Words = Field(default=(), description="accepted bearer keys; none = no key needed")
    process: Literal["separate", "inline"] = Field(
        default="separate", description="engine in its own process, or in the server's"
    )
    max_body_bytes: Bytes = Field(
        default=64 * 2**20, ge=1024, le=2**31, description="largest request body, 1 KiB-2 GiB"
    )


class Plugins(Table):
    """Which installed plugins may be imported, and which win."""

    mode: Literal["all", "allow-listed", "builtin-only"] = Field(
        default="all", description="what may be imported at all"
    )
    allow: Names = Field(
        default=(), description="dist, dist/name or dist/kind:name, for allow-listed"
    )
    deny: Names = Field(default=(), description="the same patterns; wins over allow")
    auto: Names = Field(default=(), description="distributions that take part in automatic choice")
    prefer: Names = Field(default=(), description="full ids that win a conflict of short names")
    pin: dict[str, str] = Field(default={}, description="distribution -> sha256:... of its RECORD")
    strict: bool = Field(default=False, description="side effects of a plugin's import are errors")
    allow_files: bool = Field(default=False, description="module_path may be an absolute .py file")


class Settings(Table):
    """Everything that one engine or server is configured with."""

    model: str = Field(default="", description="model reference; empty = the embedded default")
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    served_model_name: Words = Field(
        default=(), description="names in the API; none = the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of weights and activations"
    )
    max_model_len: int | None = Field(
        default=None, ge=1, le=2**27, description="context in tokens; none = the model's"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="seed of requests that bring none")
    skip_tokenizer_init: bool = Field(default=False, description="token ids only, no text")
    enforce_eager: bool = Field(default=False, description="never capture device graphs")
    data_dir: str | None = Field(
        default=None, description="downloads and caches; none = CARDCAGE_HOME"
    )
    hardware: Hardware = Hardware()
    attention: Attention = Attention()
    linear: LinearTable = LinearTable()
    quant: Quant = Quant()
    speculator: SpeculatorTable = SpeculatorTable()
    executor: Executor = Executor()
    loader: LoaderTable = LoaderTable()
    kv: KV = KV()
    scheduler: SchedulerTable = SchedulerTable()
    sampling: SamplingTable = SamplingTable()
    server: Server = Server()
    plugins: Plugins = Plugins()
    plugin: dict[str, dict[str, Any]] = Field(
        default={}, description='options of plugins: [plugin."dist/name"]'
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        step = self.scheduler.max_num_batched_tokens
        if self.scheduler.long_prefill_token_threshold > step:
            raise ValueError(
                "scheduler.long_prefill_token_threshold "
                f"{self.scheduler.long_prefill_token_threshold} is more than "
                f"scheduler.max_num_batched_tokens {step}; lower it or set 0"
            )
        return self
