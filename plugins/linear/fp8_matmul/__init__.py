"""FP8 times FP8: e4m3 weights with e4m3 inputs, native where the device can, else emulated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import LinearCaps, LinearKernel, LinearNeed, PluginContext

_ACTS = ("token", "token_bound", "static")
_GROUPS = ("group", "group_ue8m0", "token")


class Fp8MatmulOptions(BaseModel):
    """How FP8 products are computed where the device has no FP8 arithmetic."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    native: Literal["auto", "off"] = Field(
        "auto", description="use the device's FP8 arithmetic where it works, or never"
    )
    emulation: Literal["cached", "streaming"] = Field(
        "cached", description="weights decoded once (memory of a plain model), or in every call"
    )


class Fp8Matmul:
    """FP8 weights and inputs (W8A8): scales per tensor, row or block."""

    name = "fp8_matmul"
    api = "linear>=1.0,<2"
    caps = LinearCaps(
        encoding=frozenset(
            {f"fp8:row/{a}" for a in _ACTS}
            | {f"fp8:g{g}/{a}" for g in (16, 32, 64, 128, 256) for a in _GROUPS}
        ),
        layer=frozenset({"linear", "moe"}),
        priority=40,
    )
    options = Fp8MatmulOptions

    def build(self, need: LinearNeed, ctx: PluginContext, options: Any) -> LinearKernel:
        from cardcage.plugins.linear.fp8_matmul.kernel import make_kernel

        return make_kernel(need, options or Fp8MatmulOptions(), ctx.logger)
