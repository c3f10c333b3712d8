"""Grouped-query attention: project, normalise, rotate, attend through the cache, project back.

  [q | k | v] = W_qkv x (+ b);  q, k = norm(q), norm(k);  q, k = rope(q, k)
  o = softmax(scale q k^T + mask) v, softcap and sinks by the backend;  y = W_o o (+ b)

Source: Ainslie et al. 2023 (GQA); flags as in models.md 2.3 of this project's specification.
"""

from __future__ import annotations

import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.core.runtime.layers import BuildContext, ModelInput
from cardcage.plugins.blocks._args import refuse_rest
from cardcage.plugins.blocks._norms import RmsNorm


class GroupedQueryAttention:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, node: Node, ctx: BuildContext) -> None:
        args = dict(node.args)
        heads, kv_heads = args.pop("num_heads"), args.pop("num_kv_heads")
        size = args.pop("head_size")
        rope = args.pop("rope", None)
        scale = args.pop("scale", size**-0.5)
        qkv_bias, o_bias = args.pop("qkv_bias", False), args.pop("o_bias", False)
        qk_norm, variant = args.pop("qk_norm", None), args.pop("qk_norm_variant", "llama")
        eps = args.pop("eps", 1e-6)
        window, softcap = args.pop("window", 0), args.pop("softcap", 0.0)
        with_sinks, fused = args.pop("sinks", False), args.pop("fused_qkv", False)
        refuse_rest("gqa", args)

        prefix, hidden = node.prefix, ctx.desc.hidden_size
        widths = (heads * size, kv_heads * size, kv_heads * size)
        if fused:
            self._qkv = ctx.linear(f"{prefix}.qkv_proj", hidden, sum(widths), qkv_bias)
        else:
            parts = tuple(f"{prefix}.{name}_proj" for name in "qkv")
            self._qkv = ctx.linear(parts, hidden, widths, qkv_bias)
        self._o = ctx.linear(f"{prefix}.o_proj", heads * size, hidden, o_bias)

        self._q_norm: RmsNorm | None = None
        self._k_norm: RmsNorm | None = None
        self._full_norm = qk_norm == "full"
        if qk_norm is not None:
            if qk_norm not in ("head", "full"):
                raise UnsupportedModel(f"{prefix}: qk_norm {qk_norm!r} is neither head nor full")
            q_width, k_width = (widths[0], widths[1]) if self._full_norm else (size, size)
            self._q_norm = RmsNorm(ctx, f"{prefix}.q_norm.weight", q_width, eps, variant)
            self._k_norm = RmsNorm(ctx, f"{prefix}.k_norm.weight", k_width, eps, variant)

        sinks = ctx.param(f"{prefix}.sinks", heads, torch.float32) if with_sinks else None
        self._rope = None if rope is None else ctx.rope(rope)
        self._attend = ctx.attention(
            prefix,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        self._heads, self._kv_heads, self._size = heads, kv_heads, size
        self._width = heads * size

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        tokens = x.shape[0]
        heads, kv_heads, size = self._heads, self._kv_heads, self._size
        qkv = self._qkv(x)
        # q and k lie side by side, so that without norms one rotation serves both.
        qk, v = qkv.view(tokens, -1, size).split_with_sizes((heads + kv_heads, kv_heads), 1)
        rope = self._rope
        if self._q_norm is None or self._k_norm is None:
            if rope is not None:
                qk = rope.rotate(qk, inp.ropes[rope.index])
            q, k = qk.split_with_sizes((heads, kv_heads), 1)
        else:
            if self._full_norm:
                k_width = kv_heads * size
                q = self._q_norm(qkv.narrow(1, 0, self._width)).view(tokens, heads, size)
                k = self._k_norm(qkv.narrow(1, self._width, k_width)).view(tokens, kv_heads, size)
            else:
                q, k = qk.split_with_sizes((heads, kv_heads), 1)
                q, k = self._q_norm(q), self._k_norm(k)
            if rope is not None:
                tables = inp.ropes[rope.index]
                q, k = rope.rotate(q, tables), rope.rotate(k, tables)
        return self._o(self._attend(q, k, v, inp).reshape(tokens, self._width))
