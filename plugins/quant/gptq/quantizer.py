"""Reads GPTQ checkpoints (AutoGPTQ, GPTQModel, transformers).

| tensor | shape | meaning |
|---|---|---|
| qweight | int32 [K * bits / 32, N] | a bit stream down each column, row 0 of W^T first |
| qzeros | int32 [G, N * bits / 32] | a bit stream along N; v1 stores zero - 1, v2 the zero |
| scales | float [G, N] | multiplier |
| g_idx | int32 [K] | group of each input feature; required with desc_act, else k // group_size |

w[n, k] = (q[k, n] - zero[g, n]) * scales[g, n] with g = g_idx[k]. A layer is quantized if its
`qweight` is there (`modules_to_not_convert` only says what to miss where neither is). `dynamic`
rules may change bits and group size of a layer, or leave it out. Some converters add a bias of
zeros to layers that have none: it is read, checked and left out.

All parts concatenate along N except `gidx` (act-order), which keeps components apart.

Source: quant.md 3.3 of this project's specification.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, PluginContext, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.quant._codecs import packed_record, unpack_bits, words_to_stream
from cardcage.plugins.quant._stored import (
    choice,
    config_of,
    contains,
    disagree,
    names_list,
    plain_record,
    refuse_unknown,
    require,
    spellings,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_KEYS = frozenset(
    {
        "quant_method", "bits", "group_size", "desc_act", "sym", "lm_head", "dynamic",
        "checkpoint_format", "pack_dtype", "modules_to_not_convert", "is_marlin_format",
        "modules_in_block_to_quantize",
    }
)  # fmt: skip
# How the file was made or which kernel its maker preferred; the tensors are the same.
_HARMLESS = frozenset(
    {
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta",
        "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "backend",
        "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
        "batch_size", "pad_token_id", "cache_block_outputs", "mse", "quantizer", "version",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gptq:
    """bits 2, 3, 4 or 8; group 0 means all of K; `act_order` promises a g_idx that matters."""

    bits: int
    group: int
    act_order: bool
    v1: bool


def parse_config(config: Mapping[str, Any]) -> GptqQuantizer:
    """The quantizer for a `quantization_config`. Raises ModelError naming what is unsupported."""
    choice(config, "quant_method", ("gptq",))
    refuse_unknown(config, _KEYS | _HARMLESS)
    choice(config, "is_marlin_format", (False, None), False)
    choice(config, "pack_dtype", ("int32", "torch.int32", None))
    format_ = choice(config, "checkpoint_format", ("gptq", "gptq_v2", None))
    choice(config, "sym", (True, False), True)
    scheme = Gptq(
        bits=choice(config, "bits", (2, 3, 4, 8)),
        group=_group(config.get("group_size")),
        act_order=choice(config, "desc_act", (True, False), False),
        v1=format_ != "gptq_v2",
    )
    rules: list[tuple[bool, re.Pattern[str], Gptq]] = []
    for pattern, change in (config.get("dynamic") or {}).items():
        rules.append(_rule(pattern, change or {}, scheme))
    return GptqQuantizer(scheme, rules, names_list(config, "modules_to_not_convert"))


def _group(value: Any, place: str = "quantization_config") -> int:
    if type(value) is not int or (value <= 0 and value != -1):
        raise ModelError(f"{place}.group_size is {value!r}; expected -1 or a number above 0")
    return max(value, 0)


def _rule(
    pattern: str, change: Mapping[str, Any], scheme: Gptq
) -> tuple[bool, re.Pattern[str], Gptq]:
    """One entry of `dynamic`: (quantized?, pattern, the scheme for what it matches)."""
    place = f"quantization_config.dynamic[{pattern!r}]"
    skip, text = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
    refuse_unknown(change, {"bits", "group_size", "sym", "desc_act", *_HARMLESS}, place)
    if "bits" in change:
        scheme = replace(scheme, bits=choice(change, "bits", (2, 3, 4, 8), place=place))
    if "group_size" in change:
        scheme = replace(scheme, group=_group(change["group_size"], place))
    if "desc_act" in change:
        act_order = choice(change, "desc_act", (True, False), place=place)
        scheme = replace(scheme, act_order=act_order)
    try:
        return not skip, re.compile(text), scheme
    except re.error as error:
        raise ModelError(f"{place} is not a regular expression: {error}") from error


class GptqQuantizer:
    """`qweight`, `qzeros`, `scales` (and `g_idx`) of each quantized layer, or a plain weight."""

    def __init__(
        self,
        scheme: Gptq,
        rules: list[tuple[bool, re.Pattern[str], Gptq]],
        ignored: tuple[str, ...],
    ) -> None:
        self._scheme = scheme
        self._rules = rules
        self._ignored = ignored

    @classmethod
    def from_context(cls, ctx: PluginContext) -> GptqQuantizer:
        """From the checkpoint's config in the context's extras."""
        return parse_config(config_of(ctx, "gptq"))

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The packed tensors that are there, or the plain weight."""
        scheme = self._of(desc, index)
        if scheme is None:
            return (f"{desc.name}.weight",)
        names = [f"{desc.name}.{s}" for s in ("qweight", "qzeros", "scales")]
        g_idx, bias = f"{desc.name}.g_idx", f"{desc.name}.bias"
        if scheme.act_order or g_idx in index:
            names.append(g_idx)
        if not desc.bias and bias in index:
            names.append(bias)
        return tuple(names)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """Codes as a bit stream along K per output row, scales and zeros [N, G].

        Raises:
            CheckpointError: a shape or dtype that does not fit, or a bias that is not zero.
        """
        scheme = self._of(desc, index)
        if scheme is None:
            return plain_record(desc, tensors, dtype)
        name, (n, k, bits) = desc.name, (desc.out_features, desc.in_features, scheme.bits)
        if k * bits % 32 or n * bits % 32:
            raise CheckpointError(
                f"{name}.qweight: {bits}-bit GPTQ packs whole 32-bit words, which a weight "
                f"[{n}, {k}] does not fill"
            )
        groups = -(-k // scheme.group) if scheme.group else 1
        get = tensors.__getitem__
        words = require(
            f"{name}.qweight", get(f"{name}.qweight"), (torch.int32,), (k * bits // 32, n)
        )
        zeros = require(
            f"{name}.qzeros", get(f"{name}.qzeros"), (torch.int32,), (groups, n * bits // 32)
        )
        scales = require(f"{name}.scales", get(f"{name}.scales"), _FLOATS, (groups, n))
        zero = unpack_bits(words_to_stream(zeros), bits, n)
        if scheme.v1:
            zero = (zero + 1) & ((1 << bits) - 1)
        bias = tensors.get(f"{name}.bias")
        if bias is not None and bool(bias.ne(0).any()):
            raise CheckpointError(
                f"{name}.bias is not zero, but the model has no bias there; config and weights "
                "do not belong together"
            )
        return packed_record(
            f"{name}.qweight", bits, (n, k), words_to_stream(words.t()), scales.t(), zero.t(),
            scheme.group, tensors.get(f"{name}.g_idx"),
        )  # fmt: skip

    def _of(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> Gptq | None:
        """The scheme of a layer, None if it is stored plain. Index and config must agree."""
        packed, plain = f"{desc.name}.qweight" in index, f"{desc.name}.weight" in index
        scheme, skipped = self._scheme, ""
        for keep, pattern, changed in self._rules:
            if any(pattern.match(n) for n in spellings(desc.name)):
                scheme, skipped = changed, "" if keep else pattern.pattern
                break
        if packed and plain:
            raise CheckpointError(f"{desc.name} is stored twice: as weight and as qweight")
        if packed and skipped:
            where = f"that this layer is not quantized (dynamic rule '-:{skipped}')"
            raise disagree(f"{desc.name}.qweight", "packed codes", where)
        if packed:
            return scheme
        missing = not (plain or skipped or contains(desc.name, self._ignored))
        return scheme if missing and desc.layer != "embedding" else None
