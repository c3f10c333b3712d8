"""Checkpoint layouts of 8-bit weights: one code per byte beside scales per tensor, row or block.

fp8 (`weight` float8_e4m3fn), int8 (`weight` int8) and the 8-bit formats of compressed-tensors
differ in their configs only; the tensors are read here. A scale's granularity follows from its
shape, checked against the block that the config declares.

Source: quant.md 3.1, 3.2 and 3.5 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.quant._codecs import Layout, make_record, require_finite
from cardcage.plugins.quant._stored import disagree, is_plain, require

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True)
class EightBit:
    """How a layer's bytes mean numbers.

    Attributes:
        family: "fp8" or "int8".
        block: (rows, columns) that share a scale; None for a scale per tensor or per row.
        act: the activation scheme of the encoding, "" to leave x alone.
        bound: for act "token_bound", the largest magnitude of x that is not clamped.
    """

    family: str
    block: tuple[int, int] | None = None
    act: str = ""
    bound: float = 0.0


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size` of a config: rows and columns that share a scale."""
    value = config.get("weight_block_size")
    if value is None:
        return None
    sizes = list(value) if isinstance(value, list | tuple) else []
    if len(sizes) != 2 or not all(type(s) is int and s > 0 for s in sizes):
        raise ModelError(
            f"quantization_config.weight_block_size is {value!r}; expected [rows, columns]"
        )
    return sizes[0], sizes[1]


def one_name(name: str, suffixes: tuple[str, ...], index: Mapping[str, TensorMeta]) -> str:
    """The tensor that holds a scale, by any of its spellings; the first one if none is there."""
    found = [f"{name}.{s}" for s in suffixes if f"{name}.{s}" in index]
    if len(found) > 1:
        raise CheckpointError(f"{name}: {' and '.join(found)} both claim to be its scale")
    return found[0] if found else f"{name}.{suffixes[0]}"


def stored_as_codes(desc: LinearDesc, index: Mapping[str, TensorMeta], ignored: bool) -> bool:
    """Whether a layer's weight is stored as codes: the index decides, the config must agree.

    Raises:
        CheckpointError: config and index disagree, naming the tensor and both views.
    """
    name = f"{desc.name}.weight"
    meta = index.get(name)
    scaled = any(f"{desc.name}.{s}" in index for s in WEIGHT_SCALES)
    if meta is None:  # missing: name what the config calls for
        return not ignored and (scaled or desc.layer != "embedding")
    if is_plain(meta):
        if scaled:
            raise disagree(
                name, f"plain {meta.dtype} with scales beside it", "that it is quantized"
            )
        return False
    if ignored:
        raise disagree(name, f"{meta.dtype}", "that this layer is not quantized")
    return True


def slots_of(name: str, scheme: EightBit, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
    """The checkpoint tensors of a quantized weight, all required."""
    names = [f"{name}.weight", one_name(name, WEIGHT_SCALES, index)]
    if scheme.act in ("static", "static_asym"):
        names.append(one_name(name, INPUT_SCALES, index))
    if scheme.act == "static_asym":
        names.append(f"{name}.input_zero_point")
    return tuple(names)


def record_of(
    desc: LinearDesc,
    scheme: EightBit,
    tensors: Mapping[str, Tensor],
    index: Mapping[str, TensorMeta],
) -> QuantTensor:
    """The record, its scales repeated per row.

    Raises:
        CheckpointError: a wrong dtype or shape, NaN codes, or a scale that is not finite.
    """
    n, k = desc.out_features, desc.in_features
    weight = f"{desc.name}.weight"
    codes = require(weight, tensors[weight], (_CODES[scheme.family],), (n, k))
    if scheme.family == "fp8" and bool(((codes.view(torch.uint8) & 127) == 127).any()):
        raise CheckpointError(f"{weight} holds NaN: the checkpoint is damaged")
    scale_name = one_name(desc.name, WEIGHT_SCALES, index)
    scale = _row_scales(scale_name, tensors[scale_name], scheme, n, k)
    group = 0 if scale.shape[1] == 1 else (scheme.block or (1, 0))[1]
    act = scheme.act
    if act == "group" and not group:
        act = "token"  # one group of activations is the whole row
    elif act == "group_ue8m0" and scheme.block is not None:
        group = scheme.block[1]
    parts = {"weight": codes.contiguous(), "scale": scale}
    if act in ("static", "static_asym"):
        name = one_name(desc.name, INPUT_SCALES, index)
        value = require(name, tensors[name], _FLOATS, (), (1,), (1, 1)).float()
        _positive(name, value)
        parts["input_scale"] = value.reshape(1, 1).repeat(n, 1)
    if act == "static_asym":
        name = f"{desc.name}.input_zero_point"
        zero = require(name, tensors[name], (torch.int8, torch.int32), (), (1,), (1, 1))
        parts["input_zero"] = zero.reshape(1, 1).to(torch.int32).repeat(n, 1)
    if act == "token_bound":
        parts["input_bound"] = torch.full((n, 1), scheme.bound)
    return make_record(Layout(scheme.family, group, act=act), (n, k), parts)


def _row_scales(name: str, stored: Tensor, scheme: EightBit, n: int, k: int) -> Tensor:
    """A stored scale as float32 [N, 1] or, for blocks, [N, ceil(K / columns)]."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    if scheme.block is None:
        require(name, stored, _SCALES, (), (1,), (1, 1), (n,), (n, 1))
        scale = stored.float().reshape(-1, 1)
        scale = scale.expand(n, 1).contiguous()
    else:
        rows, cols = scheme.block
        require(name, stored, _SCALES, (-(-n // rows), -(-k // cols)))
        scale = stored.float().repeat_interleave(rows, dim=0)[:n].contiguous()
    require_finite(name, scale)
    return scale


def _positive(name: str, scale: Tensor) -> None:
    require_finite(name, scale)
    if not bool((scale > 0).all()):
        raise CheckpointError(f"{name} is {float(scale.min())}; a scale must be above zero")
