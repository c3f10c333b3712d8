"""Reads compressed-tensors checkpoints, layer by layer in the scheme of the layer's group.

| format | tensors of a layer |
|---|---|
| float-quantized, naive-quantized | `weight` e4m3 [N, K], `weight_scale` per tensor, row, group or
block, `input_scale` if static |
| int-quantized, naive-quantized | the same with int8; `input_zero_point` if static asymmetric |
| pack-quantized | `weight_packed` int32 [N, ceil(K * bits / 32)], codes + 2^(bits - 1), a bit
stream along K; `weight_scale` [N, G]; `weight_shape` [2]; asymmetric: `weight_zero_point` int32
[ceil(N * bits / 32), G], a bit stream along N; actorder "group": `weight_g_idx` [K] |

actorder "weight" and "static" need nothing at run time. All parts concatenate along N except
`gidx` (actorder "group"), which keeps the components of a fused layer apart.

Source: quant.md 3.5 of this project's specification; checked against the PyPI package
compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, PluginContext, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.plugins.quant._codecs import packed_record, unpack_bits, words_to_stream
from cardcage.plugins.quant._eightbit import record_of, slots_of
from cardcage.plugins.quant._stored import (
    config_of,
    disagree,
    is_plain,
    kv_scale_names,
    plain_record,
    require,
)
from cardcage.plugins.quant.compressed_tensors.scheme import (
    Group,
    Packed,
    find_group,
    is_ignored,
    parse_config,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTS = (torch.int64, torch.int32)


class CompressedQuantizer:
    """Each layer by the first group that matches it; layers on the ignore list are plain."""

    def __init__(
        self, groups: tuple[Group, ...], ignore: tuple[str, ...], drop_kv_scales: bool
    ) -> None:
        self._groups = groups
        self._ignore = ignore
        self._drop_kv_scales = drop_kv_scales

    @classmethod
    def from_context(cls, ctx: PluginContext, options: Any) -> CompressedQuantizer:
        """From the checkpoint's config in the context's extras."""
        config = config_of(ctx, "compressed-tensors")
        groups, ignore = parse_config(config, options.drop_kv_scales)
        return cls(groups, ignore, options.drop_kv_scales)

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The tensors of the layer's format, or the plain weight."""
        names = self._slots(desc, index)
        return names + (kv_scale_names(desc, index) if self._drop_kv_scales else ())

    def _slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        group = self._group(desc, index)
        if group is None:
            return (f"{desc.name}.weight",)
        if not isinstance(group.scheme, Packed):
            return slots_of(desc.name, group.scheme, index)
        names = ["weight_packed", "weight_scale", "weight_shape"]
        if not group.scheme.symmetric:
            names.append("weight_zero_point")
        if group.scheme.act_order:
            names.append("weight_g_idx")
        return tuple(f"{desc.name}.{s}" for s in names)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """The record of the layer's scheme.

        Raises:
            CheckpointError: a tensor whose dtype or shape does not fit the scheme.
        """
        group = self._group(desc, index)
        if group is None:
            return plain_record(desc, tensors, dtype)
        if isinstance(group.scheme, Packed):
            return packed(desc, group.scheme, tensors)
        return record_of(desc, group.scheme, tensors, index)

    def _group(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> Group | None:
        """The layer's group, None for a plain layer. Index and config must agree."""
        group = None if is_ignored(self._ignore, desc) else find_group(self._groups, desc)
        name = desc.name
        meta = index.get(f"{name}.weight")
        has_packed = f"{name}.weight_packed" in index
        if meta is not None and has_packed:
            raise CheckpointError(f"{name} is stored twice: as weight and as weight_packed")
        if group is None:
            if has_packed:
                raise disagree(f"{name}.weight_packed", "packed codes", _UNTOUCHED)
            if meta is not None and not is_plain(meta):
                raise disagree(f"{name}.weight", meta.dtype, _UNTOUCHED)
            return None
        wants_packed = isinstance(group.scheme, Packed)
        if meta is not None and (wants_packed or is_plain(meta)):
            what = f"group {group.name!r} quantizes this layer"
            raise disagree(f"{name}.weight", f"a tensor of {meta.dtype}", what)
        if has_packed and not wants_packed:
            what = f"group {group.name!r} stores 8-bit codes unpacked"
            raise disagree(f"{name}.weight_packed", "packed codes", what)
        return group


_UNTOUCHED = "that this layer is not quantized (on the ignore list, or in no group)"


def packed(desc: LinearDesc, scheme: Packed, tensors: Mapping[str, Tensor]) -> QuantTensor:
    """The record of a pack-quantized layer; the codes are the checkpoint's own bytes."""
    name, n, k, bits = desc.name, desc.out_features, desc.in_features, scheme.bits

    def get(what: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        full = f"{name}.{what}"
        return require(full, tensors[full], dtypes, *shapes)

    groups = -(-k // scheme.group) if scheme.group else 1
    words = get("weight_packed", (torch.int32,), (n, -(-k * bits // 32)))
    stored = [int(v) for v in get("weight_shape", _INTS, (2,)).tolist()]
    if stored != [n, k]:
        raise CheckpointError(f"{name}.weight_shape is {stored}, the model needs [{n}, {k}]")
    loose = ((n,), (1,), (1, 1), ()) if groups == 1 else ()
    scale = get("weight_scale", _FLOATS, (n, groups), *loose)
    if tuple(scale.shape) != (n, groups):
        scale = scale.reshape(-1, 1).expand(n, 1)
    zero = None
    if not scheme.symmetric:
        zeros = get("weight_zero_point", (torch.int32,), (-(-n * bits // 32), groups))
        zero = unpack_bits(words_to_stream(zeros.t()), bits, n).t()
    gidx = None
    if scheme.act_order:
        gidx = get("weight_g_idx", _INTS, (k,))
    return packed_record(
        f"{name}.weight_packed", bits, (n, k), words_to_stream(words), scale, zero,
        scheme.group, gidx,
    )  # fmt: skip
