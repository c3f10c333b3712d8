"""Which logits survive top-k and top-p: one threshold per row, ties always kept.

The kept set is exactly `z >= threshold`. top-k: the k-th largest value. top-p, among what top-k
left: the largest value t such that the entries >= t hold at least p of the mass. Masses are
whole numbers (2**36 for the largest entry) summed in float64, so that sums are exact in any
order and a row's threshold cannot depend on its batch-mates. Hosts sort a few candidates; other
devices search over the bits of float32 (one Triton kernel, or `bisect`) without a host sync.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cardcage.core.runtime.rng import has_triton

# Sums below 2**53 are exact: 131,072 entries as likely as the largest. Beyond that all addends
# that matter are equal, and multiples of 2**36 stay exact.
_SCALE = 2.0**36
# On a host, look first at the entries this far (natural log) below the largest.
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
        rows = zip(z.numpy(), top_k.tolist(), top_p.tolist())
        return torch.tensor([row_threshold(row, k, p) for row, k, p in rows])
    if has_triton():
        from cardcage.core.runtime import sampling_kernels

        return sampling_kernels.thresholds(z, top_k, top_p)
    return bisect(z, top_k, top_p)


def masses(z: torch.Tensor, peak: torch.Tensor | float) -> torch.Tensor:
    """Mass of each entry, float32 of z's shape: round(exp(z - peak) * 2**36).

    `peak` is finite and broadcasts against z: the largest entry of a row.
    """
    return (z - peak).exp_().mul_(_SCALE).round_()


def bisect(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`thresholds` for any device, without a host sync: 32 halvings over the bits of float32."""
    vocab = z.shape[1]
    # Monotone map of float32 to int32; adding 0.0 makes -0.0 equal to 0.0 here too.
    bits = (z + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).to(torch.int64)
    kth = _largest(keys, None, limit)
    peak = z.amax(dim=-1)
    peak = torch.where(torch.isfinite(peak), peak, 0.0)
    kept = masses(z, peak[:, None]).masked_fill_(keys < kth[:, None], 0)
    need = (kept.sum(dim=-1, dtype=torch.float64) * top_p.to(torch.float64)).ceil()
    key = _largest(keys, kept, need)
    key = torch.where((top_p < 1.0) & (need > 0), key, kth)
    value = torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)
    return torch.where((limit < vocab) | (top_p < 1.0), value, -torch.inf)


def _largest(keys: torch.Tensor, mass: torch.Tensor | None, need: torch.Tensor) -> torch.Tensor:
    """The largest int32 key t with mass(keys >= t) >= need; mass None counts entries."""
    found = torch.zeros_like(need, dtype=torch.int64)
    for bit in range(31, -1, -1):
        tried = found | (1 << bit)
        above = keys >= (tried - 2**31).to(torch.int32)[:, None]
        if mass is None:
            held = above.sum(dim=-1)
        else:
            held = (mass * above).sum(dim=-1, dtype=torch.float64)
        found = torch.where(held >= need, tried, found)
    return (found - 2**31).to(torch.int32)


def row_threshold(row: NDArray[np.float32], k: int, p: float, low: float = -np.inf) -> float:
    """The threshold of one row in host memory, among its entries that are at least `low`.

    Args:
        row: float32 [V]; not changed.
        k: 0 or >= V keeps all.
        p: >= 1 keeps all.
    """
    peak = row.max()
    if not np.isfinite(peak):
        return low
    if 0 < k < len(row):
        near = _reach(row, low, peak, k)
        if len(near) >= k:
            low = max(low, float(np.partition(near, len(near) - k)[len(near) - k]))
    if p >= 1.0:
        return low
    left = row if low == -np.inf else row[row >= low]
    mass = masses(torch.from_numpy(left), float(peak))
    need = np.ceil(float(mass.sum(dtype=torch.float64)) * p)
    for reach in _NEAR:
        near = left if reach == np.inf else left[left >= peak - np.float32(reach)]
        ranked = torch.sort(torch.from_numpy(near), descending=True).values
        held = masses(ranked, float(peak)).cumsum(0, dtype=torch.float64).numpy()
        if held[-1] >= need:
            break
    return float(ranked[int(np.searchsorted(held, need))])


def _reach(row: NDArray[np.float32], low: float, peak: np.float32, k: int) -> NDArray[np.float32]:
    """Entries >= low that include the k largest of them, if there are so many."""
    for reach in _NEAR:
        bound = max(low, float(peak - np.float32(reach)))
        above = row >= np.float32(bound)
        if bound == low or np.count_nonzero(above) >= k:
            break
    near: NDArray[np.float32] = row[above]
    return near
