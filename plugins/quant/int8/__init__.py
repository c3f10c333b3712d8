"""INT8 checkpoints: int8 weights with scales per tensor, row or block, int8 activations (W8A8)."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class Int8:
    """INT8 W8A8 checkpoints: static (also asymmetric) or dynamic activations, or weights only."""

    name = "int8"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"blockwise_int8", "int8", "w8a8_int8"}), priority=50)

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.int8.quantizer import Int8Quantizer

        return Int8Quantizer.from_context(ctx)
