"""Declaration of the attention backend for hosts, compiled from C on first use."""

from __future__ import annotations

import shutil
import sys
from typing import Any, ClassVar

from cardcage.core.contracts import AttentionCaps, AttentionNeed, MultipleOf, PluginContext

COMPILERS = ("cc", "gcc", "clang")


class CpuPaged:
    """Paged attention for hosts in C: reads the cache in place, no gathered copy."""

    name: ClassVar[str] = "cpu_paged"
    api: ClassVar[str] = "attention>=1.0,<2"
    caps: ClassVar[AttentionCaps] = AttentionCaps(
        op=frozenset({"paged"}),
        device_type=frozenset({"cpu"}),
        dtype=frozenset({"bfloat16", "float32"}),
        kv_format=frozenset({"auto"}),
        head_size=MultipleOf(8, 512),
        value_size=MultipleOf(16, 512),
        block_size=MultipleOf(16),
        features=frozenset(
            {"window", "softcap", "sinks", "prefix", "mixed", "lse", "deterministic"}
        ),
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
        if sys.platform == "win32":
            out.append("it is built with gcc or clang, which it does not look for on Windows")
        elif not any(shutil.which(name) for name in COMPILERS):
            names = ", ".join(COMPILERS)
            out.append(f"no C compiler ({names}) is on PATH; install gcc or clang")
        return out

    def build(self, need: AttentionNeed, ctx: PluginContext, options: Any) -> Any:
        from .backend import Backend

        return Backend(need, ctx.data_dir)
