"""GPTQ checkpoints: 2, 3, 4 and 8 bit codes packed along the input features."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class Gptq:
    """GPTQ checkpoints of 2, 3, 4 or 8 bits, v1 and v2 zero points, with or without act-order."""

    name = "gptq"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"gptq"}), priority=50)

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.gptq.quantizer import GptqQuantizer

        return GptqQuantizer.from_context(ctx)
