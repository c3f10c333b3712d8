"""INT8 times INT8: int8 weights with int8 inputs, summed exactly in int32."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import Between, LinearCaps, LinearKernel, LinearNeed, PluginContext

_ACTS = ("token", "token_asym", "static", "static_asym")
_GROUPS = ("group", "token")


class Int8Matmul:
    """INT8 weights and inputs (W8A8) with exact int32 sums, by torch's integer product."""

    name = "int8_matmul"
    api = "linear>=1.0,<2"
    caps = LinearCaps(
        encoding=frozenset(
            {f"int8:row/{a}" for a in _ACTS}
            | {f"int8:g{g}/{a}" for g in (16, 32, 64, 128, 256) for a in _GROUPS}
        ),
        layer=frozenset({"linear", "moe"}),
        in_features=Between(1, 65536),  # sums and zero-point corrections fit 32 bits
        priority=40,
    )

    def build(self, need: LinearNeed, ctx: PluginContext, options: Any) -> LinearKernel:
        from cardcage.plugins.linear.int8_matmul.kernel import make_kernel

        return make_kernel(need)
