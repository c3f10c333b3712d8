"""Log-probabilities of chosen tokens: own value, rank and best alternatives, without a softmax.

Only the log-sum-exp, a gather and a top-n per row; nothing of the vocabulary's length is kept.
`LogprobRows.parse` turns the downloaded arrays into `TokenLogprob`s on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cardcage.core.types import TokenLogprob


@dataclass(slots=True)
class LogprobRows:
    """n rows on the device: value float32 [n], rank int32 [n], top values and ids [n, top]."""

    value: torch.Tensor
    rank: torch.Tensor
    top_value: torch.Tensor
    top_id: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.value, self.rank, self.top_value, self.top_id]


def score(z: torch.Tensor, ids: torch.Tensor, top: int, normalize: bool) -> LogprobRows:
    """Values of `ids` and of the `top` best entries of each row.

    Args:
        z: float32 [n, V]; not changed.
        ids: int64 [n].
        top: how many alternatives; 0 for none.
        normalize: subtract the log-sum-exp (natural log); False returns the logits themselves.
    """
    value = z.gather(1, ids[:, None])
    # Entries that are at least as likely, the token itself included: 1-based.
    rank = (z >= value).sum(dim=-1).to(torch.int32)
    best = torch.topk(z, top, dim=-1)
    shift = _log_sum_exp(z)[:, None] if normalize else torch.zeros_like(value)
    return LogprobRows(
        (value - shift)[:, 0], rank, best.values - shift, best.indices.to(torch.int32)
    )


def _log_sum_exp(z: torch.Tensor) -> torch.Tensor:
    """float32 [n]. Sums in float64, so that the order of a reduction shows in no result."""
    peak = z.amax(dim=-1)
    peak = torch.where(torch.isfinite(peak), peak, 0.0)
    total = (z - peak[:, None]).exp_().sum(dim=-1, dtype=torch.float64)
    return (total.log() + peak).to(torch.float32)


def parse(ids: NDArray[Any], arrays: list[NDArray[Any]], row: int, top: int) -> TokenLogprob:
    """Row `row` of downloaded `LogprobRows.tensors()`, with its best `top` alternatives.

    Alternatives of equal value are in the order of their ids, whatever the device's was.
    """
    value, rank, top_value, top_id = arrays
    order = np.lexsort((top_id[row], -top_value[row]))[:top]
    best = tuple((int(top_id[row, i]), float(top_value[row, i])) for i in order)
    return TokenLogprob(int(ids[row]), float(value[row]), int(rank[row]), best)
