"""The one merge of partial attention results by their log-sum-exp.

Whoever computes attention over a set of keys in pieces (split-KV decode, shared prefixes, latent
context, context parallelism, row caches) gets one partial output and one LSE per piece and calls
`merge`. Everything here is natural log. A piece without a visible key has LSE -inf and may hold
anything (NaN too) as its output: it is never multiplied.

    M = max_p lse_p          w_p = exp(lse_p - M)          lse = M + log(sum_p w_p)
    out = sum_p w_p * out_p / sum_p w_p                    (0 and -inf when no piece has a key)

Source: FlashAttention (arXiv 2205.14135) section 3.1; Flash-Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["clean", "merge"]


def clean(lse: torch.Tensor) -> torch.Tensor:
    """The LSE with NaN and +inf (no meaning) turned into -inf (no visible key)."""
    bad = torch.isnan(lse) | (lse == float("inf"))
    return lse.masked_fill(bad, float("-inf"))


def merge(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention result from P partial ones over disjoint sets of keys.

    Args:
        outs: [P, T, H, Dv] or P tensors [T, H, Dv], any float dtype. Each is normalised: it is
            the softmax-weighted mean over its own keys.
        lses: [P, H, T] or P tensors [H, T], natural log; NaN and +inf count as -inf.

    Returns:
        out [T, H, Dv] in the dtype of `outs` and lse [H, T] (float32; float64 for float64
        inputs). Rows without any key are 0 and -inf. Sums run in float32 (float64).
    """
    out_p = outs if isinstance(outs, torch.Tensor) else torch.stack(list(outs))
    lse_p = lses if isinstance(lses, torch.Tensor) else torch.stack(list(lses))
    acc = torch.float64 if out_p.dtype == torch.float64 else torch.float32
    lse_p = clean(lse_p.to(acc))
    top = lse_p.amax(dim=0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weight = torch.exp(lse_p - top)
    total = weight.sum(dim=0)
    lse = torch.where(total > 0, top + torch.log(total), float("-inf"))
    per_row = weight.transpose(1, 2).unsqueeze(-1)  # [P, T, H, 1]
    weighted = torch.where(per_row > 0, out_p.to(acc) * per_row, 0.0).sum(dim=0)
    norm = total.transpose(0, 1).unsqueeze(-1)
    out = torch.where(norm > 0, weighted / norm, 0.0)
    return out.to(out_p.dtype), lse
