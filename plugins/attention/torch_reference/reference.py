"""Attention as a formula: dense keys, float64, no paging. What every backend is compared with.

    s_ij = scale * q_i . k_j            softcap c: s -> c * tanh(s / c)
    visible: j <= i, and j > i - window when window > 0
    o_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink))      lse_i = log of the denominator

Nothing here is fast; it must be short enough to be checked by eye.
"""

from __future__ import annotations

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last rows of one request over all its keys.

    Args:
        q: [T, H, D]; row t is at position first_position + t.
        k: [L, K, D] and v: [L, K, Dv], row j at position j. H is a multiple of K.
        first_position: position of the first query row.
        sinks: [H], one extra logit per head that takes weight but has no value; not scaled.

    Returns:
        out [T, H, Dv] and lse [H, T], both float64. A row that sees no key and has no finite
        sink is 0 and -inf.
    """
    group = q.shape[1] // k.shape[1]
    q64 = q.double().transpose(0, 1)  # [H, T, D]
    k64 = k.double().repeat_interleave(group, dim=1).transpose(0, 1)
    v64 = v.double().repeat_interleave(group, dim=1).transpose(0, 1)
    scores = scale * (q64 @ k64.transpose(1, 2))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = first_position + torch.arange(q.shape[0], device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)[None, :]
    visible = j <= i
    if window > 0:
        visible &= j > i - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, extra], dim=-1)
        v64 = torch.cat([v64, torch.zeros_like(v64[:, :1])], dim=1)
    if scores.shape[-1] == 0:
        scores = torch.full((*scores.shape[:2], 1), float("-inf"), dtype=torch.float64)
        v64 = v64.new_zeros(v64.shape[0], 1, v64.shape[2])
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return (weights @ v64).transpose(0, 1), lse
