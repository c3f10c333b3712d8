"""What a checkpoint says about its layers: config keys, layer names, tensors that are there.

The rules shared by the checkpoint quantizers. Unknown config keys are refused by name. Layer
patterns compare in the checkpoint's namespace, with and without the usual leading `model.` and
`language_model.`. Which layers are quantized is read from the tensors that are present, and a
config that says otherwise is an error that names the tensor and both views.

Source: quant.md 1.3, 1.4 and 1.7 of this project's specification.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import LinearDesc, PluginContext, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError

_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
_PLAIN = ("float32", "float16", "bfloat16", "float64")


# ---- the config ---------------------------------------------------------------------------------


def config_of(ctx: PluginContext, plugin: str) -> Mapping[str, Any]:
    """The checkpoint's `quantization_config`. Raises ModelError if the host gave none."""
    config = ctx.extras.get("quantization_config")
    if not isinstance(config, Mapping) or not config:
        raise ModelError(
            f"quantizer {plugin}: the model's config.json has no quantization_config, which says "
            'how the weights are stored; add it, or choose quant.use = "none" for plain weights'
        )
    return config


def refuse_unknown(
    config: Mapping[str, Any], known: Iterable[str], place: str = "quantization_config"
) -> None:
    """Raises ModelError naming keys that are set, mean something, and are not understood."""
    unknown = sorted(k for k, v in config.items() if k not in set(known) and v not in (None, {}))
    if unknown:
        raise ModelError(
            f"{place}: {', '.join(map(repr, unknown))} not supported here, so the weights could "
            "be read wrongly; remove the key if it does not change how tensors are stored"
        )


def choice(
    config: Mapping[str, Any],
    key: str,
    allowed: Sequence[Any],
    default: Any = None,
    place: str = "quantization_config",
) -> Any:
    """config[key] (or the default). Raises ModelError naming key, value and what is allowed."""
    value = config.get(key, default)
    if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
        known = ", ".join(repr(a) for a in allowed)
        raise ModelError(f"{place}.{key} is {value!r}; supported: {known}")
    return value


def names_list(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The first of these keys that is set, as a tuple of names."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise ModelError(f"quantization_config.{key} must be a list of names, got {value!r}")
        if value:
            return tuple(value)
    return ()


# ---- layer names --------------------------------------------------------------------------------


def spellings(name: str) -> tuple[str, ...]:
    """A layer's name under every root that checkpoints use, its own first; then fused forms."""
    root = next(r for r in _ROOTS if name.startswith(r))
    core = name[len(root) :]
    names = [name, *(r + core for r in _ROOTS)]
    head, _, last = name.rpartition(".")
    if last in _FUSED:
        core_head = core.rpartition(".")[0]
        fused = _FUSED[last]
        names += [f"{head}.{fused}", *(f"{r}{core_head}.{fused}" for r in _ROOTS)]
    return tuple(dict.fromkeys(names))


def listed(name: str, patterns: Sequence[str]) -> bool:
    """Exact name, or a prefix or suffix that ends at a dot (`b_proj` does not hit `q_b_proj`)."""
    return any(
        n == p or n.startswith(p + ".") or n.endswith("." + p)
        for n in spellings(name)
        for p in patterns
    )


def contains(name: str, patterns: Sequence[str]) -> bool:
    """A pattern is a substring of the name (AWQ's rule)."""
    return any(p in name for p in patterns)


def matches(name: str, pattern: str) -> bool:
    """`re:` and a regular expression that matches at the start; else the exact name."""
    if pattern.startswith("re:"):
        compiled = re.compile(pattern[3:])
        return any(compiled.match(n) for n in spellings(name))
    return pattern in spellings(name)


def matches_glob(name: str, pattern: str) -> bool:
    """As `matches`, or an fnmatch pattern (`*.down_proj`)."""
    if matches(name, pattern):
        return True
    return not pattern.startswith("re:") and any(
        fnmatch.fnmatchcase(n, pattern) for n in spellings(name)
    )


# ---- tensors ------------------------------------------------------------------------------------


def is_plain(meta: TensorMeta) -> bool:
    """True for a tensor of ordinary floats."""
    return meta.encoding == "none" and meta.dtype in _PLAIN


def disagree(name: str, stored: str, config: str) -> CheckpointError:
    """The error for a config and an index that do not fit together."""
    return CheckpointError(
        f"{name}: the checkpoint stores {stored}, but its quantization_config says {config}; "
        "one of them is wrong, so nothing is guessed"
    )


def plain_record(
    desc: LinearDesc, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> QuantTensor:
    """A layer that is not quantized: its weight in the compute dtype, encoding "none"."""
    name = f"{desc.name}.weight"
    weight = tensors[name]
    if str(weight.dtype).removeprefix("torch.") not in _PLAIN:
        raise CheckpointError(
            f"{name} has dtype {weight.dtype} and no scales beside it, so it cannot be a weight"
        )
    n, k = (int(s) for s in weight.shape)
    return QuantTensor("none", (n, k), {"weight": weight.to(dtype)}, _decode, _decode_rows)


def _decode(record: QuantTensor) -> Tensor:
    return record.parts["weight"].float()


def _decode_rows(record: QuantTensor, ids: Tensor) -> Tensor:
    return record.parts["weight"].index_select(0, ids).float()


def require(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...]
) -> Tensor:
    """The tensor itself. Raises CheckpointError unless dtype and one of the shapes fit."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, expected {wanted}")
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected {wanted}")
    return tensor


def kv_scale_names(desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
    """Scales of a quantized KV cache that lie beside a key or value projection."""
    parent, _, last = desc.name.rpartition(".")
    if last not in ("k_proj", "v_proj", "qkv_proj"):
        return ()
    own = (f"{desc.name}.{s}" for s in ("k_scale", "v_scale", "kv_scale", "output_scale"))
    shared = (
        f"{parent}.{mid}{s}"
        for mid in ("", "attn.")
        for s in ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")
    )
    return tuple(n for n in (*own, *shared) if n in index)
