"""Weights kept in 8, 4 or 2 bits on GPUs, decoded inside the product (W8A16, W4A16)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import (
    AtLeast,
    LinearCaps,
    LinearKernel,
    LinearNeed,
    MultipleOf,
    PluginContext,
)

_GROUPS = ("row", "g32", "g64", "g128")


def _encodings() -> frozenset[str]:
    """All that the kernel runs. int2 in groups of 32 is 8 bytes, too few for the matrix units."""
    names = {f"fp8:{g}" for g in _GROUPS}
    for kind in ("int8", "int4", "int2"):
        for group in _GROUPS:
            if (kind, group) == ("int2", "g32"):
                continue
            orders = ("",) if group == "row" else ("", "+gidx")
            names |= {f"{kind}:{group}{zero}{order}" for zero in ("", "+zero") for order in orders}
    return frozenset(names)


class TritonPackedOptions(BaseModel):
    """When a step leaves the packed product."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dense_rows: int | None = Field(
        None,
        ge=1,
        description="from this many rows the weight is decoded once per call instead; unset: 17 "
        "below 8 bits, else 128",
    )


class TritonPacked:
    """Triton product with packed weights (fp8, int8, int4, int2): reads only their own bytes."""

    name = "triton_packed"
    api = "linear>=1.0,<2"
    caps = LinearCaps(
        encoding=_encodings(),
        layer=frozenset({"linear", "moe"}),
        device_type=frozenset({"cuda"}),
        arch=AtLeast((8, 0)),
        dtype=frozenset({"bfloat16", "float16", "float32"}),
        in_features=MultipleOf(32),
        requires={"triton>=3.6": "pip install 'triton>=3.6'"},
        priority=45,
    )
    options = TritonPackedOptions

    def build(self, need: LinearNeed, ctx: PluginContext, options: Any) -> LinearKernel:
        from cardcage.plugins.linear.triton_packed.launcher import PackedKernel

        return PackedKernel(need, options or TritonPackedOptions())
