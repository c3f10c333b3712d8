"""AWQ checkpoints: 4 and 8 bit codes packed along the output features in an interleaved order."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class Awq:
    """AWQ checkpoints of the GEMM layout, 4 or 8 bits, with zero points."""

    name = "awq"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"awq"}), priority=50)

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.awq.quantizer import AwqQuantizer

        return AwqQuantizer.from_context(ctx)
