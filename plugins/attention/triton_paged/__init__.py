"""Declaration of the Triton attention backend."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import (
    AtLeast,
    AttentionCaps,
    AttentionNeed,
    Between,
    MultipleOf,
    PluginContext,
)


class TritonPaged:
    """Paged attention in Triton: prefill, split-KV decode and mixed batches on GPUs."""

    name: ClassVar[str] = "triton_paged"
    api: ClassVar[str] = "attention>=1.0,<2"
    caps: ClassVar[AttentionCaps] = AttentionCaps(
        op=frozenset({"paged"}),
        device_type=frozenset({"cuda"}),
        arch=AtLeast((8, 0)),
        dtype=frozenset({"bfloat16", "float16", "float32"}),
        kv_format=frozenset({"auto"}),
        head_size=MultipleOf(16, 256),
        value_size=MultipleOf(16, 256),
        block_size=MultipleOf(16),
        group_size=Between(1, 64),
        features=frozenset(
            {"window", "softcap", "sinks", "prefix", "mixed", "lse", "graphs", "deterministic"}
        ),
        requires={"triton>=3.6": "pip install 'triton>=3.6'"},
        priority=50,
    )
    options: ClassVar[None] = None

    def reasons_against(self, need: AttentionNeed) -> list[str]:
        out = []
        if need.num_heads % need.num_kv_heads:
            out.append(
                f"num_heads {need.num_heads} is not a multiple of {need.num_kv_heads} KV heads"
            )
        if need.scale <= 0:
            out.append(f"scale {need.scale} is not positive")
        return out

    def build(self, need: AttentionNeed, ctx: PluginContext, options: Any) -> Any:
        from .launcher import Backend

        num_sms = ctx.hardware.facts().num_sms if ctx.hardware is not None else 0
        return Backend(need, num_sms=num_sms)
