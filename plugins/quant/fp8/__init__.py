"""FP8 checkpoints: e4m3 weights with scales per tensor, per channel or per block."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class Fp8Options(BaseModel):
    """Options of the fp8 quantizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    drop_kv_scales: bool = Field(
        False, description="leave out the checkpoint's KV cache scales and keep the cache plain"
    )


class Fp8:
    """FP8 (e4m3) checkpoints: static or dynamic activations, blocks such as 128x128, FBGEMM."""

    name = "fp8"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"fp8", "fbgemm_fp8"}), priority=50)
    options = Fp8Options

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.fp8.quantizer import Fp8Quantizer

        return Fp8Quantizer.from_context(ctx, options or Fp8Options())
