"""Layer norm over the hidden vector."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import BlockCaps, BlockNeed, Caps
from cardcage.core.model_desc import Node
from cardcage.plugins.blocks._args import refuse_rest


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w + b, in float32. Arguments: eps, bias (default true)."""

    name: ClassVar[str] = "layernorm"
    api: ClassVar[str] = "blocks>=1.0,<2"
    caps: ClassVar[Caps] = BlockCaps()

    def build(self, need: BlockNeed, ctx: Any, options: Any) -> LayerNorm:
        return self

    def make(self, node: Node, ctx: Any) -> Any:
        """node.prefix.weight and .bias are [hidden]."""
        from cardcage.plugins.blocks._norms import LayerNorm as Norm
        from cardcage.plugins.blocks._norms import NormBlock

        args = dict(node.args)
        eps, bias = args.pop("eps"), args.pop("bias", True)
        refuse_rest(self.name, args)
        norm = Norm(ctx, node.prefix, ctx.desc.hidden_size, eps, bias)
        return NormBlock(norm)
