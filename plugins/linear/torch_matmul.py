"""Unquantized weights through torch's own matrix product, on any device."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import Caps, LinearCaps, LinearNeed


class TorchMatmul:
    """y = x W^T + b by torch.nn.functional.linear, for weights stored as plain numbers."""

    name: ClassVar[str] = "torch_matmul"
    api: ClassVar[str] = "linear>=1.0,<2"
    caps: ClassVar[Caps] = LinearCaps(encoding=frozenset({"none"}), priority=30)

    def build(self, need: LinearNeed, ctx: Any, options: Any) -> Any:
        from cardcage.plugins.linear._torch_matmul import MatmulKernel

        return MatmulKernel()
