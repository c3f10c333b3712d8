"""4-bit products on x86 hosts: GGUF blocks run packed for few rows, dense for many."""

from __future__ import annotations

import platform
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import (
    LinearCaps,
    LinearKernel,
    LinearNeed,
    MultipleOf,
    PluginContext,
)


class CpuInt4Options(BaseModel):
    """When a step leaves the packed product, and whether a dense copy is kept for that."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dense: Literal["auto", "always", "never"] = Field(
        "auto", description="keep a dense copy too; auto: if it takes 1/256 of memory or less"
    )
    packed_rows: int | None = Field(
        None, ge=0, description="most rows run packed; unset: chosen by instruction set"
    )


class CpuInt4:
    """Reads a quarter of the bytes of bf16: for decoding, which waits for memory."""

    name = "cpu_int4"
    api = "linear>=1.0,<2"
    caps = LinearCaps(
        encoding=frozenset({"gguf:q4_0", "gguf:q4_1", "gguf:q4_k", "gguf:q8_0"}),
        layer=frozenset({"linear", "moe"}),
        device_type=frozenset({"cpu"}),
        dtype=frozenset({"bfloat16"}),
        in_features=MultipleOf(32),
        out_features=MultipleOf(16),
        # Below the decoded product: scales in bfloat16 cost answers (6 of 12 reference cases keep
        # all 32 greedy ids against 11), so it is for those who ask for speed by name.
        priority=5,
    )
    options = CpuInt4Options

    def reasons_against(self, need: LinearNeed) -> list[str]:
        """torch's 4-bit product is vectorised for x86 only."""
        machine = platform.machine().lower()
        return [] if machine in ("x86_64", "amd64") else [f"the processor is {machine}, not x86"]

    def build(self, need: LinearNeed, ctx: PluginContext, options: Any) -> LinearKernel:
        from cardcage.plugins.linear.cpu_int4.kernel import CpuInt4Kernel

        facts = ctx.hardware.facts() if ctx.hardware is not None else None
        return CpuInt4Kernel(options or CpuInt4Options(), facts)
