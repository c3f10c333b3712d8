"""Which logits survive top-k and top-p: one threshold per row, ties always kept.

The kept set is exactly `z >= threshold`. top-k: the k-th largest value. top-p, among what top-k
left: the largest value t such that the entries >= t hold at least p of the mass. Masses are
integers (2**40 for the largest entry), so their sums are exact in any order and a row's
threshold cannot depend on its batch-mates. Hosts sort a few candidates; other devices bisect
on the bits of float32, which needs no host sync and no second buffer of the row's length.
"""

from __future__ import annotations

import numpy as np
import torch

_SCALE = 2.0**40
# On a host, top-p looks first at the entries this far (natural log) below the largest.
_NEAR = (4.0, 9.0, np.inf)


def thresholds(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest kept value of each row.

    Args:
        z: float32 [n, V], contiguous rows, after every earlier stage; not changed.
        top_k: int32 or int64 [n]; 0 or >= V keeps all.
        top_p: float32 [n]; >= 1 keeps all.

    Returns:
        float32 [n]; -inf where nothing is dropped.
    """
    if z.device.type == "cpu":
        return _host(z, top_k, top_p)
    return bisect(z, top_k, top_p)


def masses(z: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Integer mass of each entry: int64 [n, V], round(exp(z - peak) * 2**40).

    Args:
        peak: float32 [n], the largest entry of each row; rows without a finite one get zeros.
    """
    peak = torch.where(torch.isfinite(peak), peak, 0.0)
    return (z - peak[:, None]).exp_().mul_(_SCALE).round_().to(torch.int64)


def _needed(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass that must be kept: int64, ceil(p * total) in float64."""
    return (total.to(torch.float64) * top_p.to(torch.float64)).ceil().to(torch.int64)


def bisect(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`thresholds` for any device, without a host sync: 32 halvings over the bits of float32."""
    vocab = z.shape[1]
    # Monotone map of float32 to int32; adding 0.0 makes -0.0 equal to 0.0 here too.
    bits = (z + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).to(torch.int64)
    kth = _largest(keys, None, limit)
    kept = masses(z, z.amax(dim=-1)).masked_fill_(keys < kth[:, None], 0)
    need = _needed(kept.sum(dim=-1), top_p)
    key = _largest(keys, kept, need)
    key = torch.where((top_p < 1.0) & (need > 0), key, kth)
    value = torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)
    return torch.where((limit < vocab) | (top_p < 1.0), value, -torch.inf)


def _largest(keys: torch.Tensor, mass: torch.Tensor | None, need: torch.Tensor) -> torch.Tensor:
    """The largest int32 key t with mass(keys >= t) >= need; mass None counts entries."""
    found = torch.zeros_like(need)
    for bit in range(31, -1, -1):
        tried = found | (1 << bit)
        above = keys >= (tried - 2**31).to(torch.int32)[:, None]
        held = above.sum(dim=-1) if mass is None else (mass * above).sum(dim=-1)
        found = torch.where(held >= need, tried, found)
    return (found - 2**31).to(torch.int32)


def _host(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab = z.shape[1]
    out = np.full(z.shape[0], -np.inf, np.float32)
    ks = [k if 0 < k < vocab else 0 for k in top_k.tolist()]
    ranked = [i for i, k in enumerate(ks) if k]
    best: dict[int, torch.Tensor] = {}
    if ranked:
        lists = torch.topk(z if len(ranked) == len(ks) else z[ranked], max(ks), dim=-1).values
        best = {i: lists[j, : ks[i]] for j, i in enumerate(ranked)}
        out[ranked] = [float(values[-1]) for values in best.values()]
    for i, p in enumerate(top_p.tolist()):
        if p < 1.0:
            out[i] = _top_p_row(z[i], best.get(i), p)
    return torch.from_numpy(out)


def _top_p_row(row: torch.Tensor, best: torch.Tensor | None, p: float) -> float:
    """top-p of one row on a host: sort the near candidates, all of them only if needed.

    `best` are the top-k values in descending order, None without top-k.
    """
    values = row.numpy()
    if best is not None:
        # Usually nothing ties with the k-th value, and the sorted list is all that is left.
        kth = float(best[-1])
        if np.count_nonzero(values >= kth) == len(best):
            return _cut(best, best[:1], p, _mass(best, best[:1]))
        row = torch.from_numpy(values[values >= kth])
    peak = row.amax().view(1)
    if not torch.isfinite(peak):
        return -np.inf
    total = _mass(row, peak)
    values = row.numpy()
    for reach in _NEAR:
        near = torch.from_numpy(values[values >= float(peak) - reach])
        if _mass(near, peak) >= _need(total, p):
            break
    return _cut(torch.sort(near, descending=True).values, peak, p, total)


def _mass(values: torch.Tensor, peak: torch.Tensor) -> int:
    return int(masses(values[None], peak).sum())


def _need(total: int, p: float) -> int:
    return int(np.ceil(float(total) * p))


def _cut(ranked: torch.Tensor, peak: torch.Tensor, p: float, total: int) -> float:
    """The value in a descending list at which the mass reaches p of the total."""
    held = masses(ranked[None], peak)[0].numpy().cumsum()
    return float(ranked[min(int(np.searchsorted(held, _need(total, p))), len(ranked) - 1)])
