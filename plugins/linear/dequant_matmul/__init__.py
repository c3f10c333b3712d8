"""Any encoding on any device: decode to the compute dtype, then a plain matrix product."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import LinearCaps, LinearKernel, LinearNeed, PluginContext


class DequantMatmulOptions(BaseModel):
    """cached: memory of an unquantized model. streaming: memory of the packed one, slower."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    mode: Literal["cached", "streaming"] = Field(
        "cached", description="decode once when the weight is prepared, or in every call"
    )


class DequantMatmul:
    """The kernel of last resort: correct for every encoding whose records can be decoded."""

    name = "dequant_matmul"
    api = "linear>=1.0,<2"
    caps = LinearCaps(layer=frozenset({"linear", "moe", "embedding"}), priority=10)
    options = DequantMatmulOptions

    def build(self, need: LinearNeed, ctx: PluginContext, options: Any) -> LinearKernel:
        from cardcage.plugins.linear.dequant_matmul.kernel import make_kernel

        return make_kernel(need, options or DequantMatmulOptions())
