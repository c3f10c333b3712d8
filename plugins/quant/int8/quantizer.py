"""Reads INT8 checkpoints of the `int8`, `w8a8_int8` and `blockwise_int8` methods.

| tensor | shape | meaning |
|---|---|---|
| `weight` | int8 [N, K] | codes |
| `weight_scale` (or `weight_scale_inv`) | scalar, [N], [N, 1] or block grid | multiplier |
| `input_scale` | scalar | static activations |
| `input_zero_point` | scalar int8 or int32 | static asymmetric activations, where present |

Config: `activation_scheme` "dynamic" (one symmetric scale per token, or per token and block of
columns), "static", or null for weights only; `weight_block_size`; `ignored_layers` or
`modules_to_not_convert`. All parts of the records concatenate along N; static activations of a
fused layer are merged by the kernel to one range that covers all components.

Source: quant.md 3.2 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, PluginContext, QuantTensor, TensorMeta
from cardcage.core.errors import ModelError
from cardcage.plugins.quant._eightbit import (
    EightBit,
    block_size,
    record_of,
    slots_of,
    stored_as_codes,
)
from cardcage.plugins.quant._stored import (
    choice,
    config_of,
    listed,
    names_list,
    plain_record,
    refuse_unknown,
)

_KEYS = frozenset(
    {
        "quant_method", "activation_scheme", "ignored_layers", "modules_to_not_convert",
        "weight_block_size",
    }
)  # fmt: skip
_ACTS = {"dynamic": "token", "static": "static", None: ""}


def parse_config(config: Mapping[str, Any]) -> tuple[EightBit, tuple[str, ...]]:
    """The scheme of the quantized layers and the names that are left out.

    Raises:
        ModelError: a key or value that is not supported, by name.
    """
    method = choice(config, "quant_method", ("int8", "w8a8_int8", "blockwise_int8"))
    refuse_unknown(config, _KEYS)
    act = _ACTS[choice(config, "activation_scheme", tuple(_ACTS), "dynamic")]
    block = block_size(config)
    if method == "blockwise_int8" and block is None:
        raise ModelError("quantization_config.weight_block_size is missing for blockwise_int8")
    if block is not None and act == "static":
        raise ModelError(
            "quantization_config: activation_scheme 'static' with weight_block_size is not "
            "supported; block scales need activation_scheme 'dynamic'"
        )
    if block is not None and act == "token":
        act = "group"
    names = names_list(config, "ignored_layers", "modules_to_not_convert")
    return EightBit("int8", block, act), names


class Int8Quantizer:
    """`<name>.weight` in int8 with its scales, or a plain weight."""

    def __init__(self, scheme: EightBit, ignored: tuple[str, ...]) -> None:
        self._scheme = scheme
        self._ignored = ignored

    @classmethod
    def from_context(cls, ctx: PluginContext) -> Int8Quantizer:
        """From the checkpoint's config in the context's extras."""
        return cls(*parse_config(config_of(ctx, "int8")))

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The weight, its scale, and scale and zero point of static activations."""
        if not self._quantized(desc, index):
            return (f"{desc.name}.weight",)
        return slots_of(desc.name, self._of(desc, index), index)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """int8 codes as stored, with scales per row; plain weights in `dtype`."""
        if self._quantized(desc, index):
            return record_of(desc, self._of(desc, index), tensors, index)
        return plain_record(desc, tensors, dtype)

    def _of(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> EightBit:
        if self._scheme.act == "static" and f"{desc.name}.input_zero_point" in index:
            return replace(self._scheme, act="static_asym")
        return self._scheme

    def _quantized(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> bool:
        return stored_as_codes(desc, index, listed(desc.name, self._ignored))
