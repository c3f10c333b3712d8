"""The `quantization_config` of compressed-tensors: groups of layers, each with its scheme.

A group names its targets (`re:` patterns, layer names, class names such as `Linear`) and how
weights and input activations are quantized. The first group that matches a layer decides, names
and patterns before class names. Everything that would change the numbers and is not supported is
refused by key, value and group.

Source: quant.md 1.4 and 3.5 of this project's specification; the config format of the PyPI
package compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import ModelError
from cardcage.plugins.quant._eightbit import EightBit
from cardcage.plugins.quant._stored import choice, matches, refuse_unknown

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_CLASSES = {
    "linear": ("Linear",),
    "moe": ("Linear", "FusedMoE"),
    "embedding": ("Embedding",),
}
_KEYS = frozenset(
    {
        "quant_method", "format", "ignore", "config_groups", "kv_cache_scheme",
        "quantization_status", "sparsity_config", "transform_config",
    }
)  # fmt: skip
_HARMLESS = frozenset({"global_compression_ratio", "version"})
_GROUP_KEYS = frozenset({"targets", "format", "weights", "input_activations", "output_activations"})
_ARG_KEYS = frozenset(
    {
        "num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "actorder",
        "block_structure",
    }
)  # fmt: skip
# How scales were found, or a dtype that the stored tensor shows anyway.
_ARG_HARMLESS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


@dataclass(frozen=True, slots=True)
class Packed:
    """pack-quantized weights: `bits` 2, 3, 4 or 8, `group` 0 for a scale per row or tensor."""

    bits: int
    group: int
    symmetric: bool
    act_order: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a scheme."""

    name: str
    targets: tuple[str, ...]
    scheme: EightBit | Packed


def find_group(groups: tuple[Group, ...], desc: LinearDesc) -> Group | None:
    """The first group whose targets name the layer, else the first that names its class."""
    for group in groups:
        if any(matches(desc.name, t) for t in group.targets):
            return group
    classes = _CLASSES.get(desc.layer, ())
    return next((g for g in groups if any(c in g.targets for c in classes)), None)


def is_ignored(ignore: tuple[str, ...], desc: LinearDesc) -> bool:
    """Whether `ignore` names the layer or its class."""
    classes = _CLASSES.get(desc.layer, ())
    return any(matches(desc.name, p) or p in classes for p in ignore)


def parse_config(
    config: Mapping[str, Any], drop_kv_scales: bool
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The groups and the ignore list. Raises ModelError naming what is not supported."""
    choice(config, "quant_method", ("compressed-tensors",))
    refuse_unknown(config, _KEYS | _HARMLESS)
    choice(config, "quantization_status", ("compressed", "frozen", None))
    sparsity = config.get("sparsity_config") or {}
    choice(sparsity, "format", ("dense", None), place="quantization_config.sparsity_config")
    transforms = config.get("transform_config") or {}
    if transforms.get("config_groups"):
        raise ModelError(
            "quantization_config.transform_config asks for rotations of activations, which are "
            "not supported; use a checkpoint without transforms"
        )
    if config.get("kv_cache_scheme") is not None and not drop_kv_scales:
        raise ModelError(
            "quantization_config.kv_cache_scheme asks for a quantized KV cache, which is not "
            "supported; set the quantizer's option drop_kv_scales = true to keep the cache plain"
        )
    default = config.get("format")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("quantization_config.config_groups is missing or empty")
    ignore = config.get("ignore") or ()
    return tuple(_group(n, g, default) for n, g in groups.items()), tuple(ignore)


def _group(name: str, raw: Mapping[str, Any], default: str | None) -> Group:
    place = f"quantization_config.config_groups.{name}"
    refuse_unknown(raw, _GROUP_KEYS, place)
    targets = raw.get("targets") or ()
    if not targets or not all(isinstance(t, str) for t in targets):
        raise ModelError(f"{place}.targets must be a list of names, got {raw.get('targets')!r}")
    if raw.get("output_activations") is not None:
        raise ModelError(f"{place}.output_activations: quantized outputs are not supported")
    format_ = raw.get("format") or default
    choice({"format": format_}, "format", FORMATS, place=place)
    weights = raw.get("weights")
    if not isinstance(weights, Mapping):
        raise ModelError(f"{place}.weights is missing: only activations would be quantized")
    kind = _arguments(weights, f"{place}.weights")
    if format_ == "pack-quantized":
        if raw.get("input_activations") is not None:
            raise ModelError(
                f"{place}.input_activations with packed integer weights is not supported"
            )
        return Group(name, tuple(targets), _packed(weights, kind, f"{place}.weights"))
    wanted = {"float-quantized": ("float",), "int-quantized": ("int",)}.get(
        format_, ("float", "int")
    )
    choice(weights, "type", wanted, "int", f"{place}.weights")
    choice(weights, "num_bits", (8,), place=f"{place}.weights")
    if not weights.get("symmetric", True):
        raise ModelError(f"{place}.weights.symmetric is False; supported: True")
    acts = raw.get("input_activations")
    act = "" if acts is None else _activations(acts, weights, f"{place}.input_activations")
    block = _block(weights, f"{place}.weights")
    if act == "group" and block is None:
        raise ModelError(
            f"{place}.input_activations has strategy 'group' but the weights have no groups"
        )
    if act == "group" and block is not None and acts is not None:
        choice(acts, "group_size", (block[1],), place=f"{place}.input_activations")
    family = "fp8" if kind == "float" else "int8"
    return Group(name, tuple(targets), EightBit(family, block, act))


def _arguments(raw: Mapping[str, Any], place: str) -> str:
    """Checks the keys of one tensor's arguments; returns its type."""
    refuse_unknown(raw, _ARG_KEYS | _ARG_HARMLESS, place)
    kind: str = choice(raw, "type", ("float", "int"), "int", place)
    return kind


def _block(weights: Mapping[str, Any], place: str) -> tuple[int, int] | None:
    choice(weights, "dynamic", (False, None), place=place)
    choice(weights, "actorder", (None, "weight", "static"), place=place)
    strategy = choice(weights, "strategy", ("tensor", "channel", "group", "block"), place=place)
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "group":
        return 1, _size(weights.get("group_size"), f"{place}.group_size")
    shape = weights.get("block_structure")
    if isinstance(shape, str):  # "128x128"
        shape = [int(s) if s.isdigit() else s for s in shape.split("x")]
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        raise ModelError(f"{place}.block_structure is {shape!r}; expected [rows, columns]")
    rows, cols = (_size(s, f"{place}.block_structure") for s in shape)
    return rows, cols


def _size(value: Any, place: str) -> int:
    if type(value) is not int or value <= 0:
        raise ModelError(f"{place} is {value!r}; expected a number above 0")
    return value


def _packed(weights: Mapping[str, Any], kind: str, place: str) -> Packed:
    choice({"type": kind}, "type", ("int",), place=place)
    choice(weights, "dynamic", (False, None), place=place)
    strategy = choice(weights, "strategy", ("tensor", "channel", "group"), place=place)
    group = 0
    if strategy == "group" and weights.get("group_size") != -1:
        group = _size(weights.get("group_size"), f"{place}.group_size")
    order = choice(weights, "actorder", (None, "weight", "static", "group"), place=place)
    return Packed(
        bits=choice(weights, "num_bits", (2, 3, 4, 8), place=place),
        group=group,
        symmetric=choice(weights, "symmetric", (True, False), True, place),
        act_order=order == "group",
    )


def _activations(raw: Mapping[str, Any], weights: Mapping[str, Any], place: str) -> str:
    """The activation scheme of the encoding. Dynamic scales are per token, never per batch."""
    kind = _arguments(raw, place)
    choice({"type": kind}, "type", (weights.get("type", "int"),), place=place)
    choice(raw, "num_bits", (8,), place=place)
    choice(raw, "actorder", (None,), place=place)
    dynamic = choice(raw, "dynamic", (True, False), False, place)
    symmetric = choice(raw, "symmetric", (True, False), True, place)
    if kind == "float" and not symmetric:
        raise ModelError(f"{place}.symmetric is False; supported for float: True")
    if not dynamic:
        choice(raw, "strategy", ("tensor", None), place=place)
        return "static" if symmetric else "static_asym"
    strategy = choice(raw, "strategy", ("token", "tensor", "group", None), place=place)
    if strategy == "group":
        if not symmetric:
            raise ModelError(f"{place}.symmetric is False; supported with groups: True")
        return "group"
    return "token" if symmetric else "token_asym"
