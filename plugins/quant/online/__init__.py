"""Quantization at load: FP8 or INT8 weights made from a checkpoint of plain floats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed

Scheme = Literal[
    "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor",
    "int8", "int8_per_channel", "int8_per_channel_weight_only", "int8_per_group", "none",
]  # fmt: skip


class OnlineOptions(BaseModel):
    """What to quantize and how. "fp8" is per tensor, "int8" per group of 128 columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    scheme: Scheme = Field("fp8", description="the scheme of linear layers")
    moe: Scheme | None = Field(None, description="the scheme of experts; None = as linear layers")
    activations: Literal["dynamic", "none"] = Field(
        "dynamic", description="quantize inputs per token (W8A8), or leave them alone (W8A16)"
    )
    ignore: tuple[str, ...] = Field(
        (), description="layers to leave alone: exact name, fnmatch pattern, or re:regex"
    )
    targets: dict[str, Scheme] = Field(
        {}, description="scheme by pattern, before all else; the first match decides"
    )


class Online:
    """FP8 and INT8 made at load from float checkpoints (also from GGUF), for `quant.use`."""

    name = "online"
    api = "quant>=1.0,<2"
    activation = "opt-in"
    caps = QuantCaps(methods=frozenset({"gguf", "none"}), priority=50)
    options = OnlineOptions

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.online.quantizer import OnlineQuantizer

        return OnlineQuantizer.from_context(need, ctx, options or OnlineOptions())
