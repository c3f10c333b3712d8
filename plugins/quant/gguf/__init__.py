"""GGUF block formats: packed codes stay packed, with exact decoders."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import PluginContext, QuantCaps, Quantizer, QuantNeed


class GgufQuant:
    """Q4_0 to Q8_0, the K-quants, IQ4 and MXFP4, mixed with plain floats in one file."""

    name = "gguf"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"gguf"}), priority=50)

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        from cardcage.plugins.quant.gguf.quantizer import GgufQuantizer

        return GgufQuantizer()
