"""RMS norm over the hidden vector, in the three roundings that models use."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import BlockCaps, BlockNeed, Caps
from cardcage.core.model_desc import Node
from cardcage.plugins.blocks._args import refuse_rest


class Rms:
    """w * x / sqrt(mean(x^2) + eps). Arguments: eps, variant (llama, fp32 or 1p)."""

    name: ClassVar[str] = "rms"
    api: ClassVar[str] = "blocks>=1.0,<2"
    caps: ClassVar[Caps] = BlockCaps()

    def build(self, need: BlockNeed, ctx: Any, options: Any) -> Rms:
        return self

    def make(self, node: Node, ctx: Any) -> Any:
        """node.prefix.weight is the weight [hidden]."""
        from cardcage.plugins.blocks._norms import NormBlock, RmsNorm

        args = dict(node.args)
        eps, variant = args.pop("eps"), args.pop("variant", "llama")
        refuse_rest(self.name, args)
        norm = RmsNorm(ctx, f"{node.prefix}.weight", ctx.desc.hidden_size, eps, variant)
        return NormBlock(norm)
