"""Encodes float weights while they are loaded, one layer at a time.

The source's own quantizer reads the layer (plain floats, or GGUF blocks decoded exactly), then
the weight is encoded from float32 by its largest magnitudes:

| scheme | codes | one scale for | activations |
|---|---|---|---|
| fp8_per_tensor | e4m3 | the component | per token |
| fp8_per_channel | e4m3 | each row | per token |
| fp8_per_group | e4m3 | each row and 32 columns | per token and 32 columns |
| fp8_per_block | e4m3 | 128 x 128 | per token and 128 columns |
| int8_per_group | int8 | each row and 64 columns | per token and 64 columns |
| int8_per_channel | int8 | each row | per token |
| int8_per_channel_weight_only | int8 | each row | left alone |

Embeddings, the output head and routers are left alone unless `targets` names them. Components of
a fused layer keep their own scales (records concatenate along N). Memory: one layer in float32.

"fp8" means fp8_per_group: with three bits of mantissa, a scale for the whole tensor and inputs with
one scale per token cost twice the perplexity on small models (`benchmarks/perplexity.py`), so the
faster schemes are there by name. Its scales are the best of 8 within an octave.

Sharding: `record` normally sees whole weights, so scales do not depend on how they are sharded
later. A loader that reads only its shard passes `reduce_max` in the context's extras, called as
`reduce_max(desc, amax)` with the shard's magnitudes (float32 [1, 1], [N, 1] or the block grid) and
returning their maximum over the shards that share them; codes and scales then equal, bit for
bit, those of the unsharded weight.

Source: quant.md 6 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cardcage.core.contracts import (
    LinearDesc,
    PluginContext,
    Quantizer,
    QuantNeed,
    QuantTensor,
    TensorMeta,
)
from cardcage.core.errors import CheckpointError, PluginError
from cardcage.plugins.quant._codecs import Layout, encode_eight_bit, make_record
from cardcage.plugins.quant._stored import matches_glob, plain_record

ShardMax = Callable[[LinearDesc, Tensor], Tensor]
_BLOCKS = {"fp8_per_block": (128, 128), "fp8_per_group": (1, 32), "int8_per_group": (1, 64)}
# The broad option never touches these: they are small, and errors in them cost the most.
_UNTOUCHED = frozenset({"lm_head", "gate", "router", "shared_expert_gate"})
_SHORT = {"fp8": "fp8_per_group", "int8": "int8_per_group"}


class OnlineQuantizer:
    """`options` are `OnlineOptions`; `base` reads the source, None for plain floats."""

    def __init__(
        self, options: Any, base: Quantizer | None = None, reduce_max: ShardMax | None = None
    ) -> None:
        self._options = options
        self._base = base
        self._reduce_max = reduce_max
        used = {options.scheme, options.moe, *options.targets.values()}
        if (
            reduce_max is not None
            and options.scales == "least_error"
            and ("fp8_per_channel" in used)
        ):
            raise PluginError(
                "online: scales = 'least_error' of whole rows would differ between shards of a "
                "weight; use 'largest', or fp8_per_group, when each rank reads its own shard"
            )

    @classmethod
    def from_context(cls, need: QuantNeed, ctx: PluginContext, options: Any) -> OnlineQuantizer:
        """Resolves the source's own quantizer, which carries its method's name."""
        base = None
        if need.methods != "none":
            if ctx.resolve is None:
                raise PluginError(f"online: no resolver was given to read {need.methods!r} files")
            base = ctx.resolve("quant", need, use=need.methods, **ctx.extras)
        return cls(options, base, ctx.extras.get("reduce_max"))

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """What the source's own quantizer reads."""
        if self._base is not None:
            return tuple(self._base.slots(desc, index))
        return (f"{desc.name}.weight",)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """The encoded weight, or the source's own record where nothing is to be done.

        Raises:
            CheckpointError: the weight holds NaN or infinity.
        """
        scheme = self.scheme_of(desc)
        if scheme == "none":
            return self._source(desc, tensors, index, dtype)
        # float32: encoding from a rounded weight would move codes
        source = self._source(desc, tensors, index, torch.float32)
        return self._encode(desc, scheme, source.decode(source))

    def scheme_of(self, desc: LinearDesc) -> str:
        """The scheme of a layer by its full name ("none" = leave alone)."""
        options = self._options
        chosen = next((s for p, s in options.targets.items() if matches_glob(desc.name, p)), None)
        if chosen is None:
            special = desc.name.rpartition(".")[2] in _UNTOUCHED or desc.layer == "embedding"
            if special or any(matches_glob(desc.name, p) for p in options.ignore):
                return "none"
            moe = desc.layer == "moe" and options.moe is not None
            chosen = options.moe if moe else options.scheme
        return _SHORT.get(chosen, chosen)

    def _search(self, scheme: str) -> bool:
        scales = self._options.scales
        return scales == "least_error" or (scales == "auto" and scheme == "fp8_per_group")

    def _source(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        if self._base is not None:
            return self._base.record(desc, tensors, index, dtype)
        return plain_record(desc, tensors, dtype)

    def _encode(self, desc: LinearDesc, scheme: str, weight: Tensor) -> QuantTensor:
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"{desc.name}.weight holds NaN or infinity")
        family, _, scope = scheme.partition("_")
        block = _BLOCKS.get(scheme)
        reduce_max = self._reduce_max
        codes, scale = encode_eight_bit(
            weight, family, block, scope == "per_tensor",
            None if reduce_max is None else lambda amax: reduce_max(desc, amax),
            self._search(scheme),
        )  # fmt: skip
        act = ""
        if self._options.activations == "dynamic" and not scope.endswith("weight_only"):
            act = "group" if block is not None and scale.shape[1] > 1 else "token"
        group = block[1] if block is not None and scale.shape[1] > 1 else 0
        n, k = weight.shape
        layout = Layout(family, group, act=act)
        return make_record(layout, (int(n), int(k)), {"weight": codes, "scale": scale})
