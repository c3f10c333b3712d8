"""The weight plan: what a model wants from a checkpoint, known before any byte is read.

Every layer that owns weights describes its wishes as `PlanItem`s from the checkpoint's index
(headers only). The plan is compared with the index in both directions, so missing, unexpected
and misshapen tensors are reported by name in one error; only then the bytes are read, one layer
at a time, and handed to the kernels that will run them.

Source: docs of the safetensors index format; the completeness rule is this project's own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cardcage.core.contracts import (
    LinearDesc,
    LinearKernel,
    LinearNeed,
    Quantizer,
    QuantTensor,
    TensorMeta,
    WeightSource,
)
from cardcage.core.errors import CheckpointError

if TYPE_CHECKING:
    from cardcage.core.runtime.model import Model

logger = logging.getLogger("cardcage.weights")

Progress = Callable[[str, int, int], None]

# Tensors that checkpoints carry and no model needs: frequencies are computed from the config.
ALWAYS_DROPPED: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
_SHOWN = 8  # names listed per kind of problem; the message gives the full count


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One wish: the checkpoint tensors `sources` fill `component` of the parameter `dest`.

    `shapes` maps a source to the logical shape it must have, where the model knows it (packed
    formats define their other tensors themselves). A missing `optional` item is no error.
    """

    dest: str
    sources: tuple[str, ...]
    component: str = ""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: bool = False


class Weight(Protocol):
    """Something that owns parameters: a linear, an embedding, a vector, an expert bank."""

    name: str

    def plan(self, index: Mapping[str, TensorMeta], quantizer: Quantizer) -> list[PlanItem]: ...
    def load(self, reader: WeightReader) -> None: ...


class WeightReader:
    """What a `Weight` may ask while it loads: tensors, records, kernels. Names are the model's."""

    def __init__(
        self,
        source: WeightSource,
        names: Mapping[str, str],
        index: Mapping[str, TensorMeta],
        model: Model,
    ) -> None:
        self._source = source
        self._names = names
        self._model = model
        self.index = index
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self.index

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the host; treat it as read-only."""
        return self._source.read(self._names[name])

    def plain(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """An unpacked tensor on the host in `dtype`. Raises CheckpointError if it is packed."""
        meta = self.index[name]
        if meta.encoding != "none":
            raise CheckpointError(
                f"tensor {name!r} is stored as {meta.encoding!r}, but the model reads it as plain "
                "numbers; convert the checkpoint so that this tensor is not quantized"
            )
        return self.tensor(name).to(dtype)

    def record(self, desc: LinearDesc) -> QuantTensor:
        """The canonical record of one weight, through the model's quantizer, on the host."""
        quantizer = self._model.quantizer
        tensors = {name: self.tensor(name) for name in quantizer.slots(desc, self.index)}
        return quantizer.record(desc, tensors, self.index, self.dtype)

    def kernel(
        self, encoding: str, in_features: int, out_features: int, layer: str = "linear"
    ) -> LinearKernel:
        """The linear plugin's kernel for this encoding and shape, built once per distinct need."""
        facts = self._model.facts
        need = LinearNeed(
            encoding=encoding,
            layer=layer,
            device_type=facts.device_type,
            arch=facts.arch,
            dtype=str(self.dtype).removeprefix("torch."),
            in_features=in_features,
            out_features=out_features,
        )
        return self._model.linear_kernel(need)


def rename(
    index: Mapping[str, TensorMeta], aliases: Sequence[tuple[str, str]]
) -> tuple[dict[str, str], dict[str, TensorMeta]]:
    """The index under the model's own names, and a map from those to the checkpoint's.

    Raises:
        CheckpointError: two checkpoint tensors claim the same name.
    """
    rules = [(re.compile(pattern), replacement) for pattern, replacement in aliases]
    names: dict[str, str] = {}
    for stored in index:
        ours = stored
        for pattern, replacement in rules:
            ours = pattern.sub(replacement, ours)
        if ours in names:
            raise CheckpointError(
                f"checkpoint tensors {names[ours]!r} and {stored!r} both mean {ours!r}; "
                "keep one of them"
            )
        names[ours] = stored
    return names, {ours: index[stored] for ours, stored in names.items()}


def _numbered(title: str, names: Sequence[str]) -> str:
    shown = "".join(f"\n    {name}" for name in names[:_SHOWN])
    more = f"\n    ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"\n  {len(names)} {title}:{shown}{more}"


def check(
    plan: Iterable[PlanItem], index: Mapping[str, TensorMeta], drop: Sequence[str] = ()
) -> None:
    """Compare a plan with a checkpoint's index in both directions.

    Args:
        plan: what the model wants.
        index: what the checkpoint has, under the model's names.
        drop: regular expressions of tensors that are known and unused.

    Raises:
        CheckpointError: lists the missing, unexpected and misshapen tensors by name.
    """
    used: set[str] = set()
    missing: list[str] = []
    misshapen: list[str] = []
    for item in plan:
        used.update(item.sources)
        absent = [name for name in item.sources if name not in index]
        if absent and not item.optional:
            missing.extend(absent)
        for name, shape in item.shapes.items():
            meta = index.get(name)
            if meta is not None and tuple(meta.shape) != tuple(shape):
                misshapen.append(f"{name}: has {list(meta.shape)}, the model needs {list(shape)}")
    dropped = [re.compile(pattern) for pattern in (*ALWAYS_DROPPED, *drop)]
    unexpected = [
        name
        for name in index
        if name not in used and not any(pattern.search(name) for pattern in dropped)
    ]
    problems = ""
    if missing:
        problems += _numbered("missing", sorted(set(missing)))
    if unexpected:
        problems += _numbered("unexpected", sorted(unexpected))
    if misshapen:
        problems += _numbered("of the wrong shape", sorted(misshapen))
    if problems:
        raise CheckpointError(
            f"the checkpoint does not match the model; tensors that are{problems}\n"
            "Check that config and weights belong together and that the download is complete."
        )


def make_plan(model: Model, index: Mapping[str, TensorMeta]) -> list[PlanItem]:
    """Everything the model wants, in loading order; `index` is under the model's names."""
    items: list[PlanItem] = []
    for weight in model.weights:
        items.extend(weight.plan(index, model.quantizer))
    return items


class _Wishes(Mapping[str, TensorMeta]):
    """Stands for the index of a checkpoint that will hold whatever is asked for, unpacked."""

    def __getitem__(self, name: str) -> TensorMeta:
        if not name.endswith((".weight", ".bias")):
            raise KeyError(name)
        return TensorMeta(shape=(), dtype="float32", nbytes=0)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def wished_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model needs from an unpacked checkpoint."""
    items = make_plan(model, _Wishes())
    return {n: tuple(s) for i in items if not i.optional for n, s in i.shapes.items()}


def load_weights(model: Model, source: WeightSource, progress: Progress | None = None) -> None:
    """Fill a built model from a checkpoint: plan, check, then read.

    Args:
        model: from `build_model`; its parameters are empty before this call.
        source: the checkpoint; stays open, the caller closes it. Tensors that need neither a
            cast nor a move keep referring to its memory.
        progress: called as progress("weights", bytes done, bytes in all).

    Raises:
        CheckpointError: the checkpoint does not match the model; nothing was read then.
    """
    expect = getattr(source, "expect", None)
    if expect is not None:  # a source that makes weights up has no index of its own
        expect(wished_shapes(model), model.device, model.dtype)
    stored = source.index()
    names, index = rename(stored, model.desc.aliases)
    plans = [weight.plan(index, model.quantizer) for weight in model.weights]
    check((item for plan in plans for item in plan), index, model.desc.drop)
    sizes = [
        sum({n: index[n].nbytes for item in plan for n in item.sources if n in index}.values())
        for plan in plans
    ]
    reader = WeightReader(source, names, index, model)
    total, done = sum(sizes), 0
    if progress is not None:
        progress("weights", 0, total)
    for weight, size in zip(model.weights, sizes, strict=True):
        weight.load(reader)
        done += size
        if progress is not None:
            progress("weights", done, total)
    model.finish_loading()


def shape_of(
    names: Iterable[str], weight: str, shape: tuple[int, ...], index: Mapping[str, TensorMeta]
) -> dict[str, tuple[int, ...]]:
    """The shape to demand of `weight` if it is among `names` and not a container of raw bytes."""
    meta = index.get(weight)
    if weight not in set(names) or meta is None or meta.dtype == "uint8":
        return {}
    return {weight: shape}


def to_device(record: QuantTensor, device: torch.device) -> QuantTensor:
    """The same record with its parts on `device` (the same storage where they are there)."""
    parts: dict[str, Any] = {name: part.to(device) for name, part in record.parts.items()}
    return QuantTensor(record.encoding, record.shape, parts, record.decode, record.decode_rows)


def join_rows(records: list[QuantTensor]) -> list[QuantTensor]:
    """One record for all where their parts can be stacked row by row, else the list unchanged.

    That holds when the encodings, part names and inner shapes are equal and every part has one
    row per output feature (a scale per tensor has not, and keeps its component apart).
    """
    first = records[0]
    if len(records) == 1:
        return records
    for record in records:
        if record.encoding != first.encoding or record.parts.keys() != first.parts.keys():
            return records
        for name, part in record.parts.items():
            rows_match = part.dim() > 0 and part.shape[0] == record.shape[0]
            like = first.parts[name]
            if not rows_match or part.shape[1:] != like.shape[1:] or part.dtype != like.dtype:
                return records
    parts = {name: torch.cat([r.parts[name] for r in records]) for name in first.parts}
    rows = sum(record.shape[0] for record in records)
    shape = (rows, first.shape[1])
    return [QuantTensor(first.encoding, shape, parts, first.decode, first.decode_rows)]
