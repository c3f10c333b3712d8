"""Reads FP8 checkpoints of the `fp8` and `fbgemm_fp8` methods.

| flavour | weight | scale | activations |
|---|---|---|---|
| per tensor | e4m3 [N, K] | `weight_scale` scalar | `input_scale` scalar, or per token |
| per channel | e4m3 [N, K] | `weight_scale` [N] or [N, 1] | `input_scale` scalar, or per token |
| block | e4m3 [N, K] | `weight_scale_inv` [ceil(N/bn), ceil(K/bk)] | per token and bk columns |
| fbgemm_fp8 | e4m3 [N, K] | `weight_scale` [N, 1] | per token, magnitudes clamped to a bound |

Both scale names are multipliers. "dynamic" activations get one scale per token, never one per
batch, so that a request's numbers do not depend on its neighbours. A layer whose weight is
stored in plain floats is not quantized; `modules_to_not_convert` must agree with that. All parts
of the records concatenate along N.

Source: quant.md 3.1 of this project's specification; tensor names of public checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    kv_scale_names,
    listed,
    names_list,
    plain_record,
    refuse_unknown,
)

_KEYS = frozenset(
    {
        "quant_method", "activation_scheme", "ignored_layers", "modules_to_not_convert",
        "weight_block_size", "scale_fmt", "fmt",
    }
)  # fmt: skip
# Keys of converters and of transformers that do not change how tensors are stored.
_HARMLESS = frozenset({"dequantize", "version", "kv_cache_quant_method"})
_FBGEMM_KEYS = frozenset({"quant_method", "activation_scale_ub", "modules_to_not_convert"})


def parse_config(config: Mapping[str, Any]) -> tuple[EightBit, tuple[str, ...]]:
    """The scheme of the quantized layers and the names that are left out.

    Raises:
        ModelError: a key or value that is not supported, by name.
    """
    method = choice(config, "quant_method", ("fp8", "fbgemm_fp8"))
    if method == "fbgemm_fp8":
        refuse_unknown(config, _FBGEMM_KEYS)
        bound = config.get("activation_scale_ub", 1200.0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0:
            raise ModelError(
                f"quantization_config.activation_scale_ub is {bound!r}; expected a number above 0"
            )
        scheme = EightBit("fp8", None, "token_bound", float(bound))
        return scheme, names_list(config, "modules_to_not_convert")
    refuse_unknown(config, _KEYS | _HARMLESS)
    choice(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    rounding = choice(config, "scale_fmt", (None, "float", "ue8m0"))
    scheme_name = choice(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = block_size(config)
    if block is not None and scheme_name == "static":
        raise ModelError(
            "quantization_config: activation_scheme 'static' with weight_block_size is not "
            "supported; block scales need activation_scheme 'dynamic'"
        )
    if rounding == "ue8m0" and block is None:
        raise ModelError(
            "quantization_config.scale_fmt is 'ue8m0' without weight_block_size; supported with "
            "block scales only"
        )
    act = {"static": "static", "dynamic": "token"}[scheme_name]
    if block is not None:
        act = "group_ue8m0" if rounding == "ue8m0" else "group"
    names = names_list(config, "ignored_layers", "modules_to_not_convert")
    return EightBit("fp8", block, act), names


class Fp8Quantizer:
    """`<name>.weight` in e4m3 with its scales, or a plain weight."""

    def __init__(self, scheme: EightBit, ignored: tuple[str, ...], drop_kv_scales: bool) -> None:
        self._scheme = scheme
        self._ignored = ignored
        self._drop_kv_scales = drop_kv_scales

    @classmethod
    def from_context(cls, ctx: PluginContext, options: Any) -> Fp8Quantizer:
        """From the checkpoint's config in the context's extras."""
        scheme, ignored = parse_config(config_of(ctx, "fp8"))
        return cls(scheme, ignored, options.drop_kv_scales)

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The weight, its scale, and the input scale of static activations."""
        names: tuple[str, ...] = (f"{desc.name}.weight",)
        if self._quantized(desc, index):
            names = slots_of(desc.name, self._scheme, index)
        if self._drop_kv_scales:
            names += kv_scale_names(desc, index)
        return names

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """fp8 codes as stored, with scales per row; plain weights in `dtype`."""
        if self._quantized(desc, index):
            return record_of(desc, self._scheme, tensors, index)
        return plain_record(desc, tensors, dtype)

    def _quantized(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> bool:
        return stored_as_codes(desc, index, listed(desc.name, self._ignored))
