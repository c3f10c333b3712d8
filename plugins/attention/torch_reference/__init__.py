"""Declaration of the portable attention backend in plain torch."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import AttentionCaps, AttentionNeed, PluginContext


class TorchReference:
    """Paged attention in plain torch: any device, head size and block size."""

    name: ClassVar[str] = "torch_reference"
    api: ClassVar[str] = "attention>=1.0,<2"
    caps: ClassVar[AttentionCaps] = AttentionCaps(
        op=frozenset({"paged"}),
        kv_format=frozenset({"auto"}),
        features=frozenset(
            {"window", "softcap", "sinks", "prefix", "mixed", "lse", "deterministic"}
        ),
        priority=10,
    )
    options: ClassVar[None] = None

    def reasons_against(self, need: AttentionNeed) -> list[str]:
        if need.num_heads % need.num_kv_heads:
            return [f"num_heads {need.num_heads} is not a multiple of {need.num_kv_heads} KV heads"]
        return []

    def build(self, need: AttentionNeed, ctx: PluginContext, options: Any) -> Any:
        from .backend import Backend

        return Backend(need)
