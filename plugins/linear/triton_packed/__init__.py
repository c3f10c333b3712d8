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

_GROUPS = ("row", "g32", "g64", "g128", "g256")


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
        encoding=frozenset(
            {f"fp8:{g}" for g in _GROUPS}
            | {
                f"{kind}:{g}{zero}"
                for kind in ("int8", "int4", "int2")
                for g in _GROUPS
                if (kind, g) != ("int2", "g32")  # 8 bytes, too few for the matrix units
                for zero in ("", "+zero", "+gidx", "+zero+gidx")
            }
        ),
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
