"""Mixture of experts in torch.

  p = softmax(W_r x) in float32;  ids = the top_k largest (ties: the lowest id first)
  w = p[ids], divided by their sum if `renorm`;  y = sum_j w_j expert_{ids_j}(x)

Three ways to run the experts, equal up to rounding:
  by_expert   tokens sorted by expert, one product per expert that has any. Reads the counts on
              the host, so not for graphs; the reference, and what hosts and packed experts use.
  kernels     the same order, grouped products in Triton (`_moe_kernels`), no host sync.
  dense       every expert on every token, weighted by 0 where not chosen. No host sync, E/top_k
              times the work: the fallback on devices without Triton.

Source: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral); Qwen3 technical report.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.core.runtime.layers import BuildContext, Experts, ModelInput
from cardcage.plugins.blocks._args import refuse_rest
from cardcage.plugins.blocks._mlp import gated

Act = Callable[[torch.Tensor], torch.Tensor]
Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Experts, Act], torch.Tensor]


def route(logits: torch.Tensor, top_k: int, renorm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> (ids int64 [T, top_k], weights float32 [T, top_k]), best first.

    A stable sort rather than topk: equal scores are common in bfloat16, and which of them topk
    takes depends on the batch.
    """
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def _combine(
    rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """rows [T k, H] in expert order -> [T, H]: back in token order, weighted, summed in float32."""
    tokens, top_k = weights.shape
    back = torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, top_k, -1)
    return torch.bmm(weights.unsqueeze(1), back.to(torch.float32)).squeeze(1).to(dtype)


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bank: Experts, act: Act
) -> torch.Tensor:
    """x [T, H], ids and weights [T, k] -> [T, H]. Synchronises with the host."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=bank.num_experts).tolist()
    sorted_x = x.index_select(0, order // ids.shape[1])
    rows = torch.empty_like(sorted_x)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = sorted_x.narrow(0, start, count)
            hidden = act(bank.gate_up(expert, part))
            rows.narrow(0, start, count).copy_(bank.down(expert, hidden))
            start += count
    return _combine(rows, order, weights, x.dtype)


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bank: Experts, act: Act
) -> torch.Tensor:
    """As `by_expert`, with every expert run on every token. Dense banks only."""
    share = torch.zeros(x.shape[0], bank.num_experts, dtype=torch.float32, device=x.device)
    share.scatter_(1, ids, weights)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(bank.num_experts):
        hidden = act(bank.gate_up(expert, x))
        out.addcmul_(bank.down(expert, hidden).to(torch.float32), share[:, expert, None])
    return out.to(x.dtype)


def kernels(activation: str) -> Runner:
    """As `by_expert`, in Triton kernels that fuse the activation. Dense banks only."""
    from cardcage.plugins.blocks import _moe_kernels

    def run(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bank: Experts, act: Act
    ) -> torch.Tensor:
        assert bank.w13 is not None
        assert bank.w2 is not None
        return _moe_kernels.experts(x, ids, weights, bank.w13, bank.w2, activation)

    return run


class SparseMoe:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, node: Node, ctx: BuildContext) -> None:
        args = dict(node.args)
        experts, self._top_k = args.pop("num_experts"), args.pop("top_k")
        size, self._renorm = args.pop("intermediate_size"), args.pop("renorm")
        self._activation = args.pop("activation", "swiglu")
        self._act = gated(ctx, self._activation, size, node.prefix)
        refuse_rest("moe", args)
        if not 0 < self._top_k <= experts:
            raise UnsupportedModel(f"{node.prefix}: top_k {self._top_k} of {experts} experts")
        hidden = ctx.desc.hidden_size
        self._router = ctx.linear(f"{node.prefix}.gate", hidden, experts)
        self._bank = ctx.experts(
            f"{node.prefix}.experts",
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=size,
        )
        self._on_host = ctx.facts.device_type == "cpu"
        self._triton = ctx.triton
        self._run: Runner = by_expert

    def finish_loading(self) -> None:
        """Choose how to run, now that it is known whether the experts are dense."""
        bank = self._bank
        if bank.w13 is None or bank.w2 is None or self._on_host:
            self._run = by_expert
        elif self._triton:
            self._run = kernels(self._activation)
        else:
            self._run = dense

    @property
    def graph_safe(self) -> bool:
        """False if a step reads expert counts on the host."""
        return self._run is not by_expert

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        ids, weights = route(self._router(x), self._top_k, self._renorm)
        return self._run(x, ids, weights, self._bank, self._act)
