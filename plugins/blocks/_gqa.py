"""Grouped-query attention: project, normalise, rotate, attend through the cache, project back.

  [q | k | v] = W_qkv x (+ b);  q, k = norm(q), norm(k);  q, k = rope(q, k)
  o = softmax(scale q k^T + mask) v, softcap and sinks by the backend;  y = W_o o (+ b)

Source: Ainslie et al. 2023 (GQA); flags as in models.md 2.3 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.core.runtime.layers import BuildContext, ModelInput
from cardcage.plugins.blocks._args import refuse_rest
from cardcage.plugins.blocks._norms import RmsNorm

Pair = tuple[torch.Tensor, torch.Tensor]
Prepare = Callable[[torch.Tensor, ModelInput], Pair]


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
        self._kernel: Callable[..., torch.Tensor] | None = None
        self._full = qk_norm == "full"
        if qk_norm is not None:
            if qk_norm not in ("head", "full"):
                raise UnsupportedModel(f"{prefix}: qk_norm {qk_norm!r} is neither head nor full")
            q_width, k_width = (widths[0], widths[1]) if self._full else (size, size)
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
        self._counts, self._size, self._width = (heads, kv_heads), size, heads * size
        self._interleaved = self._rope is not None and self._rope.spec.pairing == "interleaved"
        self._prepare = self._choose(ctx, size)

    def _choose(self, ctx: BuildContext, size: int) -> Prepare:
        """How q and k are normalised and rotated: decided once."""
        if ctx.triton:
            from cardcage.plugins.blocks import _kernels

            if size <= _kernels.MAX_HEAD:
                self._kernel = _kernels.norm_rope
                return self._full_norm if self._full else self._fused
        if self._q_norm is None:
            return self._rotate_both
        return self._full_norm if self._full else self._head_norm

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        tokens, (heads, kv_heads) = x.shape[0], self._counts
        qkv = self._qkv(x).view(tokens, -1, self._size)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        q, k = self._prepare(qk, inp)
        return self._o(self._attend(q, k, v, inp).reshape(tokens, self._width))

    # qk is [T, H + K, D], a view of the fused product; each returns q [T, H, D], k [T, K, D].

    def _rotate_both(self, qk: torch.Tensor, inp: ModelInput) -> Pair:
        """No norms: q and k lie side by side, so one rotation serves both."""
        return self._split(self._rotate(qk, inp))

    def _head_norm(self, qk: torch.Tensor, inp: ModelInput) -> Pair:
        assert self._q_norm is not None
        assert self._k_norm is not None
        q, k = self._split(qk)
        return self._rotate(self._q_norm(q), inp), self._rotate(self._k_norm(k), inp)

    def _full_norm(self, qk: torch.Tensor, inp: ModelInput) -> Pair:
        assert self._q_norm is not None
        assert self._k_norm is not None
        q, k = self._split(qk)
        q = self._q_norm(q.flatten(1)).view(q.shape)
        k = self._k_norm(k.flatten(1)).view(k.shape)
        return self._rotate(q, inp), self._rotate(k, inp)

    def _fused(self, qk: torch.Tensor, inp: ModelInput) -> Pair:
        """Norms and rotation in one kernel."""
        rope, q_norm, k_norm = self._rope, self._q_norm, self._k_norm
        tables = None if rope is None else inp.ropes[rope.index]
        if q_norm is None or k_norm is None:
            if tables is None:
                return self._split(qk)
            weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
            eps, round_first = 0.0, False
        else:
            weights = (q_norm.weight, k_norm.weight)
            eps, round_first = q_norm.eps, q_norm.round_first
        assert self._kernel is not None
        heads = self._counts[0]
        return self._split(
            self._kernel(qk, heads, tables, self._interleaved, *weights, eps, round_first)
        )

    def _split(self, qk: torch.Tensor) -> Pair:
        q, k = qk.split_with_sizes(self._counts, 1)
        return q, k

    def _rotate(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        rope = self._rope
        if rope is None:
            return x
        tables = inp.ropes[rope.index]
        if self._kernel is not None:
            return self._kernel(x, 0, tables, self._interleaved, None, None, 0.0, False)
        return rope.rotate(x, tables)
