"""Reads AWQ checkpoints (AutoAWQ's "gemm" layout).

| tensor | shape | meaning |
|---|---|---|
| qweight | int32 [K, N / pf] | field i of word c holds column pf c + order[i] of W^T |
| qzeros | int32 [G, N / pf] | zero points in the same order, stored as they are |
| scales | float [G, N] | multiplier |

pf = 32 / bits codes a word; order is (0, 2, 4, 6, 1, 3, 5, 7) for 4 bits, (0, 2, 1, 3) for 8.
w[n, k] = (q[k, n] - zero[k // g, n]) * scales[k // g, n]. A layer is quantized if its `qweight`
is there: converters read the substrings of `modules_to_not_convert` differently, so that list only
says what to miss where neither tensor is there. All parts concatenate along N.

Source: quant.md 3.4 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, PluginContext, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.quant._codecs import pack_bits, packed_record
from cardcage.plugins.quant._stored import (
    choice,
    config_of,
    contains,
    names_list,
    plain_record,
    refuse_unknown,
    require,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_KEYS = frozenset(
    {
        "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version",
        "format", "modules_to_not_convert",
    }
)  # fmt: skip
# Which kernel or fusion the file's maker preferred; the tensors are the same.
_HARMLESS = frozenset(
    {"backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"}
)


def parse_config(config: Mapping[str, Any]) -> AwqQuantizer:
    """The quantizer for a `quantization_config`. Raises ModelError naming what is unsupported."""
    choice(config, "quant_method", ("awq",))
    refuse_unknown(config, _KEYS | _HARMLESS)
    for key in ("version", "format"):
        value = config.get(key)
        if value is not None and str(value).lower() != "gemm":
            raise ModelError(
                f"quantization_config.{key} is {value!r}; only AWQ's 'gemm' layout is supported"
            )
    bits = choice(config, "w_bit" if "w_bit" in config else "bits", (4, 8))
    key = "q_group_size" if "q_group_size" in config else "group_size"
    group = config.get(key)
    if type(group) is not int or (group <= 0 and group != -1):
        raise ModelError(f"quantization_config.{key} is {group!r}; expected -1 or above 0")
    zeros = choice(config, "zero_point", (True, False), True)
    ignored = names_list(config, "modules_to_not_convert")
    return AwqQuantizer(bits, max(group, 0), zeros, ignored)


def unpack_interleaved(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], columns in their logical order."""
    order, mask = _ORDER[bits], (1 << bits) - 1
    fields = [words >> (bits * order.index(j)) & mask for j in range(len(order))]
    return torch.stack(fields, dim=-1).flatten(-2).to(torch.uint8)


class AwqQuantizer:
    """`qweight`, `qzeros` and `scales` of each quantized layer, or a plain weight."""

    def __init__(self, bits: int, group: int, zeros: bool, ignored: tuple[str, ...]) -> None:
        self._bits = bits
        self._group = group
        self._zeros = zeros
        self._ignored = ignored

    @classmethod
    def from_context(cls, ctx: PluginContext) -> AwqQuantizer:
        """From the checkpoint's config in the context's extras."""
        return parse_config(config_of(ctx, "awq"))

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The packed tensors, or the plain weight."""
        if not self._quantized(desc, index):
            return (f"{desc.name}.weight",)
        names = ("qweight", "qzeros", "scales") if self._zeros else ("qweight", "scales")
        return tuple(f"{desc.name}.{s}" for s in names)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """Codes repacked along K per output row, scales and zeros [N, G].

        Raises:
            CheckpointError: a shape or dtype that does not fit.
        """
        if not self._quantized(desc, index):
            return plain_record(desc, tensors, dtype)
        name, n, k = desc.name, desc.out_features, desc.in_features
        per = 32 // self._bits
        if n % per:
            raise CheckpointError(
                f"{name}.qweight: {self._bits}-bit AWQ packs {per} output features a word, which "
                f"{n} are not a multiple of"
            )
        groups = -(-k // self._group) if self._group else 1
        words = require(
            f"{name}.qweight", tensors[f"{name}.qweight"], (torch.int32,), (k, n // per)
        )
        scales = require(f"{name}.scales", tensors[f"{name}.scales"], _FLOATS, (groups, n))
        zero = None
        if self._zeros:
            zeros = require(
                f"{name}.qzeros", tensors[f"{name}.qzeros"], (torch.int32,), (groups, n // per)
            )
            zero = unpack_interleaved(zeros, self._bits).t()
        codes = unpack_interleaved(words, self._bits).t().contiguous()
        return packed_record(
            f"{name}.qweight", self._bits, (n, k), pack_bits(codes, self._bits), scales.t(),
            zero, self._group, None,
        )  # fmt: skip

    def _quantized(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> bool:
        packed, plain = f"{desc.name}.qweight" in index, f"{desc.name}.weight" in index
        if packed and plain:
            raise CheckpointError(f"{desc.name} is stored twice: as weight and as qweight")
        ignored = contains(desc.name, self._ignored)
        return packed or not (plain or ignored or desc.layer == "embedding")
