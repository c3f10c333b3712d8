"""Grouped-query attention with every flag that the described families need."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import BlockCaps, BlockNeed, Caps
from cardcage.core.model_desc import Node


class Gqa:
    """Grouped-query attention.

    Arguments: num_heads, num_kv_heads, head_size; rope (a name, or None for no position);
    scale (default head_size ** -0.5); qkv_bias, o_bias; qk_norm (None, "head": over each head,
    "full": over all heads at once), qk_norm_variant, eps; window (0 = none, else the number of
    visible keys including the own one); softcap; sinks (one learned logit per head);
    fused_qkv (one tensor qkv_proj: q rows, then k, then v).
    """

    name: ClassVar[str] = "gqa"
    api: ClassVar[str] = "blocks>=1.0,<2"
    caps: ClassVar[Caps] = BlockCaps()

    def build(self, need: BlockNeed, ctx: Any, options: Any) -> Gqa:
        return self

    def make(self, node: Node, ctx: Any) -> Any:
        """Tensors at node.prefix: {q,k,v}_proj or qkv_proj, o_proj, {q,k}_norm, sinks."""
        from cardcage.plugins.blocks._gqa import GroupedQueryAttention

        return GroupedQueryAttention(node, ctx)
