"""Mixture of experts: a router sends each token to its best few gated MLPs."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import BlockCaps, BlockNeed, Caps
from cardcage.core.model_desc import Node


class Moe:
    """Softmax-routed experts. Arguments: num_experts, top_k, intermediate_size, renorm (divide
    the chosen weights by their sum), activation (swiglu, geglu, geglu_tanh)."""

    name: ClassVar[str] = "moe"
    api: ClassVar[str] = "blocks>=1.0,<2"
    caps: ClassVar[Caps] = BlockCaps()

    def build(self, need: BlockNeed, ctx: Any, options: Any) -> Moe:
        return self

    def make(self, node: Node, ctx: Any) -> Any:
        """Tensors at node.prefix: gate (the router) and experts, in any layout that
        `BuildContext.experts` reads."""
        from cardcage.plugins.blocks._moe import SparseMoe

        return SparseMoe(node, ctx)
