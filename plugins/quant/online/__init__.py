"""Quantization at load: FP8 or INT8 weights made from a checkpoint of plain floats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed

Scheme = Literal[
    "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_group", "fp8_per_tensor",
    "int8", "int8_per_channel", "int8_per_channel_weight_only", "int8_per_group", "none",
]  # fmt: skip


class OnlineOptions(BaseModel):
    """What to quantize and how. "fp8" and "int8" are per group: 32 and 64 columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    scheme: Scheme = Field("fp8", description="the scheme of linear layers")
    moe: Scheme | None = Field(None, description="the scheme of experts; None = as linear layers")
    activations: Literal["dynamic", "none"] = Field(
        "dynamic", description="quantize inputs per token (W8A8), or leave them alone (W8A16)"
    )
    scales: Literal["auto", "largest", "least_error"] = Field(
        "auto",
        description="a scale from the largest magnitude, or (fp8 per channel or group) the best of "
        "8 by squared error, slower to load; auto: the best for fp8_per_group",
    )
    ignore: tuple[str, ...] = Field(
        (), description="layers to leave alone: exact name, fnmatch pattern, or re:regex"
    )
    targets: dict[str, Scheme] = Field(
        {}, description="scheme by pattern, before all else; the first match decides"
    )

    @model_validator(mode="after")
    def _check(self) -> OnlineOptions:
        used = {self.scheme, self.moe or self.scheme, *self.targets.values()} - {"none"}
        wrong = sorted(used - {"fp8", "fp8_per_channel", "fp8_per_group"})
        if self.scales == "least_error" and wrong:
            raise ValueError(
                f"scales = 'least_error' needs fp8_per_channel or fp8_per_group, not {wrong[0]}"
            )
        return self


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
