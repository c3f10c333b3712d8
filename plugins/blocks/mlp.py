"""The gated MLP: down(act(gate x) * up x)."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import BlockCaps, BlockNeed, Caps
from cardcage.core.model_desc import Node


class Mlp:
    """Gated MLP. Arguments: intermediate_size, activation (swiglu, geglu, geglu_tanh), bias,
    fused (one tensor gate_up_proj: gate rows, then up rows)."""

    name: ClassVar[str] = "mlp"
    api: ClassVar[str] = "blocks>=1.0,<2"
    caps: ClassVar[Caps] = BlockCaps()

    def build(self, need: BlockNeed, ctx: Any, options: Any) -> Mlp:
        return self

    def make(self, node: Node, ctx: Any) -> Any:
        """Tensors: {gate_proj, up_proj | gate_up_proj}, down_proj at node.prefix."""
        from cardcage.plugins.blocks._mlp import GatedMlp

        return GatedMlp(node, ctx)
