"""compressed-tensors checkpoints: FP8, INT8 and packed integers, mixed by layer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class CompressedTensorsOptions(BaseModel):
    """Options of the compressed-tensors quantizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    drop_kv_scales: bool = Field(
        False, description="leave out the checkpoint's KV cache scheme and keep the cache plain"
    )


class CompressedTensors:
    """compressed-tensors: float-quantized, int-quantized, naive-quantized and pack-quantized."""

    name = "compressed-tensors"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"compressed-tensors"}), priority=50)
    options = CompressedTensorsOptions

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.compressed_tensors.quantizer import CompressedQuantizer

        return CompressedQuantizer.from_context(ctx, options or CompressedTensorsOptions())
