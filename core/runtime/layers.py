"""What blocks are made of: the two seams (Linear asks quant, Attention asks attention), RoPE,
embeddings and plain parameters, and the `BuildContext` through which a block gets them.

A block asks for these while it is built and calls them while it runs. Nothing here is looked up
during a step: kernels and backends are bound when the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F

from cardcage.core.contracts import (
    AttentionBackend,
    AttentionNeed,
    BlockNeed,
    DeviceFacts,
    LinearDesc,
    LinearKernel,
    Quantizer,
    QuantTensor,
    TensorMeta,
)
from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.core.runtime.experts import Experts
from cardcage.core.runtime.rope import Rope
from cardcage.core.runtime.weights import (
    PlanItem,
    Weight,
    WeightReader,
    join_rows,
    logger,
    shape_of,
    to_device,
)

W = TypeVar("W", bound=Weight)

__all__ = [
    "Attention",
    "Block",
    "BuildContext",
    "Embedding",
    "Experts",
    "Linear",
    "ModelInput",
    "Param",
    "Rope",
    "dtype_name",
]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class ModelInput:
    """The tokens of one step, all on the device.

    `input_ids` and `positions` are int64 [T]. `plans[key]` is what the attention backend of that
    key planned for this step. `ropes` is filled by `Model.forward`, once per step for all layers.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    plans: list[Any]
    ropes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Block(Protocol):
    """x [T, hidden] -> [T, hidden], a fresh tensor that the caller may write into.

    A block may also have: `add_norm(x, delta) -> normed` (norms: x += delta in place, then the
    norm of x, in one pass), `finish_loading()` (called once, after the last weight) and
    `graph_safe` (False if a call synchronises with the host).
    """

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor: ...


class Param:
    """A vector or small matrix of its own, for example a norm's weight.

    `tensor` is on the device after loading; None only if optional and absent.
    """

    __slots__ = ("_dtype", "_optional", "_transform", "name", "shape", "tensor")

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None,
        optional: bool,
        transform: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.tensor: torch.Tensor | None = None
        self._dtype = dtype
        self._optional = optional
        self._transform = transform

    def plan(self, index: Mapping[str, TensorMeta], quantizer: Quantizer) -> list[PlanItem]:
        shapes = {self.name: self.shape}
        return [PlanItem(self.name, (self.name,), "", shapes, self._optional)]

    def load(self, reader: WeightReader) -> None:
        if self._optional and not reader.has(self.name):
            return
        dtype = self._dtype or reader.dtype
        if self._transform is None:
            tensor = reader.plain(self.name, dtype)
        else:
            tensor = self._transform(reader.plain(self.name, torch.float32)).to(dtype)
        self.tensor = tensor.to(reader.device)


class Linear:
    """y = x W^T + b for one weight or several that share their input (fused along the output).

    Components of equal encoding become one record where their parts have one row per output
    feature; otherwise each runs by its own kernel and the results are concatenated.
    """

    __slots__ = (
        "_bias", "_handle", "_run", "_run_wide", "_tied", "bias", "encodings", "in_features",
        "layouts", "name", "out_features", "prefixes",
    )  # fmt: skip

    def __init__(
        self,
        prefixes: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        tied: Embedding | None = None,
    ) -> None:
        self.prefixes = tuple(prefixes)
        self.name = "+".join(self.prefixes)
        self.in_features = in_features
        self.out_features = tuple(out_features)
        self.bias = bias
        self.encodings: tuple[str, ...] = ()
        self.layouts: tuple[str, ...] = ()
        self._tied = tied
        self._run: Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor] = _not_loaded
        self._run_wide: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        self._handle: Any = None
        self._bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, sum of N], in x's dtype."""
        return self._run(self._handle, x, self._bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> float32 [T, sum of N], unrounded where the kernel can (`run_wide`)."""
        if self._run_wide is None:
            return self._run(self._handle, x, self._bias).to(torch.float32)
        y = self._run_wide(self._handle, x)
        return y if self._bias is None else y.add_(self._bias)

    def _descs(self) -> list[LinearDesc]:
        return [
            LinearDesc(prefix, "linear", n, self.in_features, self.bias)
            for prefix, n in zip(self.prefixes, self.out_features, strict=True)
        ]

    def plan(self, index: Mapping[str, TensorMeta], quantizer: Quantizer) -> list[PlanItem]:
        items = []
        if self._tied is not None:
            # The embedding's storage is used; a copy in the checkpoint is compared and ignored.
            items.append(PlanItem(self.name, (f"{self.name}.weight",), "tied", optional=True))
        for desc in [] if self._tied is not None else self._descs():
            names = tuple(quantizer.slots(desc, index))
            weight = f"{desc.name}.weight"
            shapes = shape_of(names, weight, (desc.out_features, desc.in_features), index)
            items.append(PlanItem(self.name, names, desc.name, shapes))
        if self.bias:
            for desc in self._descs():
                name = f"{desc.name}.bias"
                shape = {name: (desc.out_features,)}
                items.append(PlanItem(f"{self.name}.bias", (name,), desc.name, shape))
        return items

    def load(self, reader: WeightReader) -> None:
        if self.bias:
            parts = [reader.plain(f"{p}.bias", reader.dtype) for p in self.prefixes]
            self._bias = torch.cat(parts).to(reader.device)
        if self._tied is not None:
            # A copy of the record: prepare may drop parts that the embedding still needs.
            tied = self._tied.record
            records = [replace(tied, parts=dict(tied.parts))]
            self._warn_if_untied(reader)
        else:
            records = join_rows([reader.record(desc) for desc in self._descs()])
        self.encodings = tuple(record.encoding for record in records)
        bound: list[tuple[LinearKernel, Any]] = []
        for record in records:
            n, k = record.shape
            kernel = reader.kernel(record.encoding, k, n)
            bound.append((kernel, kernel.prepare(record, reader.device)))
        self.layouts = tuple(kernel.layout_id for kernel, _ in bound)
        if len(bound) == 1:
            self._run, self._handle = bound[0][0].run, bound[0][1]
            self._run_wide = getattr(bound[0][0], "run_wide", None)
            return
        biases: Sequence[torch.Tensor | None] = [None] * len(bound)
        if self._bias is not None:
            biases = torch.split(self._bias, [record.shape[0] for record in records])
        self._handle = [(k.run, h, b) for (k, h), b in zip(bound, biases, strict=True)]
        self._run = _run_components

    def _warn_if_untied(self, reader: WeightReader) -> None:
        assert self._tied is not None
        ours, theirs = f"{self.name}.weight", f"{self._tied.name}.weight"
        if not (reader.has(ours) and reader.has(theirs)):
            return
        if not torch.equal(reader.tensor(ours), reader.tensor(theirs)):
            logger.warning(
                "%s differs from %s, but the config ties them: %s is used for both",
                ours, theirs, theirs,
            )  # fmt: skip


def _not_loaded(handle: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("this model has no weights yet: call load_weights first")


def _run_components(handle: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([run(h, x, b) for run, h, b in handle], dim=-1)


class Embedding:
    """Token ids -> rows of a table, which may be packed: only the wanted rows are decoded."""

    def __init__(
        self, prefix: str, vocab_size: int, hidden_size: int, scale: float, scale_in_dtype: bool
    ) -> None:
        self.name = prefix
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.record: QuantTensor
        self._scale = scale
        self._scale_in_dtype = scale_in_dtype
        self._table: torch.Tensor | None = None
        self._factor: float | None = None
        self._dtype = torch.float32

    def _desc(self) -> LinearDesc:
        return LinearDesc(self.name, "embedding", self.vocab_size, self.hidden_size)

    def plan(self, index: Mapping[str, TensorMeta], quantizer: Quantizer) -> list[PlanItem]:
        names = tuple(quantizer.slots(self._desc(), index))
        shape = (self.vocab_size, self.hidden_size)
        return [
            PlanItem(self.name, names, "", shape_of(names, f"{self.name}.weight", shape, index))
        ]

    def load(self, reader: WeightReader) -> None:
        self.record = to_device(reader.record(self._desc()), reader.device)
        self._dtype = reader.dtype
        if self.record.encoding == "none":
            self._table = self.record.parts["weight"]
        if self._scale != 1.0:
            factor = torch.tensor(self._scale, dtype=torch.float32)
            self._factor = factor.to(reader.dtype if self._scale_in_dtype else torch.float32).item()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] -> [T, hidden] in the model's dtype, fresh memory."""
        if self._table is not None:
            x = F.embedding(ids, self._table)
        else:
            x = self.record.decode_rows(self.record, ids).to(self._dtype)
        return x if self._factor is None else x.mul_(self._factor)


class Attention:
    """The attention seam of one layer: writes K and V to the cache, then reads them all.

    `key` says which of the step's plans is this layer's; `cache` holds its views of the block
    pool and is set by the runner.
    """

    __slots__ = ("_forward", "_sinks", "_write", "backend", "cache", "key", "need", "prefix")

    def __init__(
        self, prefix: str, key: int, need: AttentionNeed, backend: AttentionBackend,
        sinks: Param | None,
    ) -> None:  # fmt: skip
        self.prefix = prefix
        self.key = key
        self.need = need
        self.backend = backend
        self.cache: tuple[torch.Tensor, ...] = ()
        self._sinks = sinks
        self._write = backend.write
        self._forward = backend.forward

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inp: ModelInput
    ) -> torch.Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, Dv], after RoPE -> [T, H, Dv].

        The last dimension is contiguous; the others may be strided (views of a fused product).
        """
        plan = inp.plans[self.key]
        self._write(k, v, self.cache, plan)
        sinks = None if self._sinks is None else self._sinks.tensor
        return self._forward(q, self.cache, plan, None, sinks)


@dataclass(slots=True)
class AttentionKey:
    """A distinct attention need with the backend that serves it, and its KV group's index."""

    need: AttentionNeed
    backend: AttentionBackend
    group: int = -1


class BuildContext:
    """What a block may ask for while a model is built. One per model; not used during a step."""

    def __init__(
        self,
        desc: ModelDesc,
        *,
        dtype: torch.dtype,
        device: torch.device,
        facts: DeviceFacts,
        resolve: Callable[..., Any],
        block_size: int,
        kv_format: str,
        max_model_len: int,
    ) -> None:
        self.desc = desc
        self.dtype = dtype
        self.device = device
        self.facts = facts
        self.resolve = resolve
        self.weights: list[Weight] = []
        self.attention_layers: list[Attention] = []
        self.attention_keys: list[AttentionKey] = []
        self.ropes: list[Rope] = []
        self.block_size = block_size
        # Whether a block may launch Triton kernels: the platform says so, never a vendor's name.
        self.triton = "triton" in facts.features and facts.device_type != "cpu"
        self._kv_format = kv_format
        self._max_model_len = max_model_len
        self._rope_index: dict[str, int] = {}
        self._blocks: dict[str, Any] = {}
        self._names: set[str] = set()

    def make(self, node: Node) -> Block:
        """The block that a node of the description names, built with the node's arguments."""
        plugin = self._blocks.get(node.block)
        if plugin is None:
            need = BlockNeed(device_type=self.facts.device_type)
            plugin = self._blocks[node.block] = self.resolve("blocks", need, use=node.block)
        block: Block = plugin.make(node, self)
        return block

    def linear(
        self,
        prefixes: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
    ) -> Linear:
        """A weight [N, K] at a checkpoint prefix, or several fused along N."""
        if isinstance(prefixes, str):
            prefixes = (prefixes,)
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        return self._own(Linear(prefixes, in_features, sizes, bias))

    def param(
        self,
        name: str,
        shape: Sequence[int] | int,
        dtype: torch.dtype | None = None,
        optional: bool = False,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Param:
        """A plain tensor by its full checkpoint name; `transform` sees it in float32."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._own(Param(name, shape, dtype, optional, transform))

    def embedding(self) -> Embedding:
        """The model's token embedding, as its description says."""
        d = self.desc
        return self._own(
            Embedding(
                d.embed_prefix, d.vocab_size, d.hidden_size, d.embed_scale, d.embed_scale_in_dtype
            )
        )

    def head(self, embedding: Embedding) -> Linear:
        """The output projection; with tied weights it shares the embedding's storage."""
        h = self.desc.head
        tied = embedding if h.tied else None
        sizes = (self.desc.vocab_size,)
        return self._own(Linear((h.prefix,), self.desc.hidden_size, sizes, h.bias, tied))

    def experts(
        self, prefix: str, *, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> Experts:
        """A bank of gated MLPs without biases at `prefix` (for example `...mlp.experts`)."""
        return self._own(Experts(prefix, num_experts, hidden_size, intermediate_size))

    def rope(self, name: str) -> Rope:
        """The RoPE that the description calls `name`; layers share its per-step tables."""
        if name not in self._rope_index:
            spec = self.desc.ropes.get(name)
            if spec is None:
                known = ", ".join(sorted(self.desc.ropes)) or "none"
                raise UnsupportedModel(
                    f"{self.desc.architecture}: a layer names RoPE {name!r}; described are {known}"
                )
            self._rope_index[name] = len(self.ropes)
            self.ropes.append(Rope(spec, len(self.ropes), self.device, self._max_model_len))
        return self.ropes[self._rope_index[name]]

    def attention(
        self,
        prefix: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Param | None = None,
    ) -> Attention:
        """The attention seam of one layer. `window` counts visible keys including the own one."""
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"{prefix}: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads"
            )
        used = {"window": window > 0, "softcap": softcap > 0, "sinks": sinks is not None}
        need = AttentionNeed(
            device_type=self.facts.device_type,
            arch=self.facts.arch,
            dtype=dtype_name(self.dtype),
            kv_format=self._kv_format,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            value_size=head_size if value_size is None else value_size,
            block_size=self.block_size,
            group_size=num_heads // num_kv_heads,
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
            scale=scale,
            features=frozenset({"prefix", "mixed", *(n for n, on in used.items() if on)}),
        )
        known = [have.need for have in self.attention_keys]
        if need not in known:
            known.append(need)
            self.attention_keys.append(AttentionKey(need, self.resolve("attention", need)))
        key = known.index(need)
        layer = Attention(prefix, key, need, self.attention_keys[key].backend, sinks)
        self.attention_layers.append(layer)
        return layer

    def _own(self, weight: W) -> W:
        if weight.name in self._names:
            raise CheckpointError(f"two layers of the model claim the weight {weight.name!r}")
        self._names.add(weight.name)
        self.weights.append(weight)
        return weight
