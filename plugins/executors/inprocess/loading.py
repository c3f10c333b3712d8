"""From a model source to a runner: dtype, context, model, weights, pool size, warm-up.

Each decision is a small function that also says why; the reasons end up in `explain()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cardcage.core.contracts import (
    Hardware,
    KVKindNeed,
    ModelNeed,
    ModelSource,
    PluginContext,
    QuantNeed,
    SamplingNeed,
)
from cardcage.core.errors import ConfigError, ResourceError, UnsupportedModel
from cardcage.core.model_desc import ModelDesc
from cardcage.core.runtime.batch import BatchState, table_bytes
from cardcage.core.runtime.graphs import GraphRunner, graph_bytes
from cardcage.core.runtime.kv_pool import KVPool, PoolSize, fit, request_bytes
from cardcage.core.runtime.model import Model, build_model, load_weights
from cardcage.core.runtime.model_runner import ModelRunner
from cardcage.core.runtime.profile import peak_bytes, warm_up
from cardcage.core.runtime.sampler import Sampler
from cardcage.core.types import KVCapacity

Progress = Callable[[str, int, int], None]
_GIB = 1 << 30


@dataclass(slots=True)
class Loaded:
    """A model ready to run, and why it is as it is."""

    runner: ModelRunner
    capacity: KVCapacity
    report: dict[str, Any]
    graphs: GraphRunner | None
    no_graphs: str

    def graphs_report(self) -> str:
        """Whether decode steps are replayed from graphs, or why not."""
        return self.no_graphs if self.graphs is None else self.graphs.report()

    def close(self) -> None:
        """Drop captured graphs before the tensors that they point at."""
        if self.graphs is not None:
            self.graphs.close()


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a model's config says about its quantization, wherever it says it; None for nothing."""
    for holder in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                found: Mapping[str, Any] = holder[key]
                return found
    return None


def _describe(model: Any, source: ModelSource, architecture: str) -> ModelDesc:
    """The model as data. A config that its plugin trips over is a fault of the config."""
    try:
        desc: ModelDesc = model.describe(source.config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{architecture}: config.json cannot be understood ({type(error).__name__}: {error})"
        ) from error
    return desc


def load_model(
    ctx: PluginContext, source: ModelSource, depth: int, progress: Progress | None
) -> Loaded:
    """Everything that `InProcessExecutor.load` promises. `depth` is the steps in flight."""
    hardware, config = ctx.hardware, ctx.config
    assert hardware is not None
    assert ctx.resolve is not None
    resolve = ctx.resolve
    device = hardware.device()
    dtype, dtype_why = choose_dtype(str(config["dtype"]), source.config, hardware)
    architecture = (source.config.get("architectures") or [""])[0]
    desc = _describe(resolve("models", ModelNeed(architecture=architecture)), source, architecture)
    max_len = choose_context(config["max_model_len"], desc)
    quantizer = resolve(
        "quant",
        QuantNeed(methods=source.quant_method, device_type=hardware.device_type),
        quantization_config=quantization_config(source.config),
    )
    model = build_model(
        desc,
        device=device,
        dtype=dtype,
        resolve=resolve,
        quantizer=quantizer,
        block_size=config["kv"]["block_size"],
        kv_format=config["kv"]["format"],
        device_facts=hardware.facts(),
        max_model_len=max_len,
    )
    weights = source.open_weights()
    try:
        stored = sum(meta.nbytes for meta in weights.index().values())
        load_weights(model, weights, progress)
    finally:
        weights.close()

    scheduler = config["scheduler"]
    seqs, tokens = int(scheduler["max_num_seqs"]), int(scheduler["max_num_batched_tokens"])
    no_graphs = why_no_graphs(config, hardware, model)
    size, size_why = pool_size(ctx, model, max_len, depth, captures=not no_graphs)
    groups = model.kv_groups()
    pool = KVPool(groups, size.num_bytes, device)
    batch = BatchState(seqs, size.max_model_len, desc.vocab_size, groups, device)
    sampling = config["sampling"]
    plugins = [
        resolve(
            "sampling",
            SamplingNeed(device_type=hardware.device_type),
            use=name,
            vocab_size=desc.vocab_size,
            device=device,
        )
        for name in sampling["use"]
    ]
    sampler = Sampler(batch, plugins, sampling["logprobs_mode"])
    stream = None if device.type == "cpu" else torch.Stream(device)
    runner = ModelRunner(model, pool, batch, sampler, stream, depth + 1)
    warm_up(runner, tokens)
    graphs = None if no_graphs else GraphRunner(runner, seqs)
    capacity = KVCapacity(groups, pool.num_bytes, seqs, size.max_model_len)
    report = {
        "model": model.explain(),
        "device": str(device),
        "dtype": f"{str(dtype).removeprefix('torch.')} ({dtype_why})",
        "weights_stored_bytes": stored,
        "kv_pool_bytes": pool.num_bytes,
        "kv_pool_why": size_why,
        "kv_blocks": {g.name: pool.num_blocks(i) - 1 for i, g in enumerate(groups)},
        "max_model_len": size.max_model_len,
        "max_model_len_why": size.note or "as configured, or the model's own",
        "sampling_plugins": list(sampling["use"]),
    }
    return Loaded(runner, capacity, report, graphs, no_graphs)


def choose_dtype(
    wanted: str, config: Mapping[str, Any], hardware: Hardware
) -> tuple[torch.dtype, str]:
    """The compute dtype and the reason. Raises ConfigError for one the platform lacks."""
    usable = hardware.dtypes()
    if wanted != "auto":
        if wanted not in usable:
            raise ConfigError(
                f"dtype {wanted} does not run on {hardware.name}; use one of {', '.join(usable)}"
            )
        return getattr(torch, wanted), "as configured"
    text = config.get("text_config") or {}
    own = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or ""
    own = str(own or text.get("torch_dtype") or "").removeprefix("torch.")
    # A platform that prefers float32 has no fast path for less; one that prefers less is not
    # asked to run float32 only because a checkpoint was saved in it.
    if usable[0] == "float32" or own == "float32" or own not in usable:
        return getattr(torch, usable[0]), f"{hardware.name} prefers it"
    return getattr(torch, own), "the checkpoint's own"


def choose_context(wanted: int | None, desc: ModelDesc) -> int:
    """The longest sequence to serve, in tokens. Raises ConfigError beyond the model's context."""
    if wanted is None:
        return desc.max_position
    if wanted > desc.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's context of {desc.max_position} "
            "tokens; lower it, or configure rope scaling in the model's config"
        )
    return wanted


def pool_size(
    ctx: PluginContext, model: Model, max_len: int, depth: int, captures: bool
) -> tuple[PoolSize, str]:
    """Bytes of the block pool and the context that fits it, with the reason for the size.

    On an accelerator what a step needs is measured; the batch tables and, if steps are captured,
    the graphs' own memory come on top.
    """
    hardware, kv, scheduler = ctx.hardware, ctx.config["kv"], ctx.config["scheduler"]
    seqs, tokens = int(scheduler["max_num_seqs"]), int(scheduler["max_num_batched_tokens"])
    assert hardware is not None
    assert ctx.resolve is not None
    groups = model.kv_groups()
    kinds = [ctx.resolve("kv_kinds", KVKindNeed(), use=group.kind, group=group) for group in groups]
    in_flight = depth * tokens

    def need(num_tokens: int) -> int:
        return request_bytes(num_tokens, in_flight, groups, kinds)

    if kv["bytes"] is not None:
        num_bytes, why = int(kv["bytes"]), "kv.bytes"
    elif hardware.device_type == "cpu":
        free, _ = hardware.memory()
        num_bytes = min(int(free * kv["utilization"]), seqs * need(max_len))
        why = f"kv.utilization {kv['utilization']} of the host memory that is available"
    else:
        speculator = ctx.config["speculator"]
        drafts = int(speculator["k"]) if speculator["use"] else 0
        peak = peak_bytes(model, tokens, seqs * (1 + drafts), max_len)
        peak += table_bytes(seqs, max_len, groups)
        peak += graph_bytes(seqs, model.desc.vocab_size) if captures else 0
        torch.accelerator.empty_cache()
        free, total = hardware.memory()
        num_bytes = int(kv["utilization"] * total) - (total - free) - peak
        why = (
            f"kv.utilization {kv['utilization']} of {total / _GIB:.2f} GiB less "
            f"{(total - free) / _GIB:.2f} GiB in use and {peak / _GIB:.2f} GiB for a step"
        )
        if num_bytes <= 0:
            raise ResourceError(f"nothing is left for the KV cache: {why}; raise kv.utilization")
    asked = ctx.config["max_model_len"] is not None
    return fit(num_bytes, max_len, asked, need, why), why


def why_no_graphs(config: Mapping[str, Any], hardware: Hardware, model: Model) -> str:
    """Why steps are not captured as graphs; empty if they are."""
    if config["enforce_eager"]:
        return "off: enforce_eager is set"
    if "graphs" not in hardware.facts().features:
        return f"off: {hardware.name} captures no graphs"
    if not model.graph_safe:
        return "off: a block of this model synchronises with the host"
    return ""
