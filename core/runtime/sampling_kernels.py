"""Two Triton kernels of the sampler: keyed draw, and thresholds of top-k and top-p.

Draw: id = argmax_v (z_v - log(E_v)), E_v = -log1p(-u_v), u_v = (w_v + 1/2) / 2**32, w_v the word
v & 3 of Philox4x32-10 with key `seed` and counter (v >> 2, position, domain, sub); ties go to
the lowest id. Thresholds: the largest t with count(z >= t) >= k, then the largest t with
mass(z >= t) >= p * mass(z >= t_k), mass_v = round(exp(z_v - max z) * 2**36) as an integer.

| tensor | shape | dtype | layout | in/out |
|---|---|---|---|---|
| z | [n, V] | float32 | row stride given, last dim contiguous | in |
| seeds, positions | [n] | int64 | contiguous | in |
| best, ids | [n, blocks] | float32, int64 | contiguous | out of draw |
| top_k, top_p | [n] | int32, float32 | contiguous | in |
| low | [n] | float32 | contiguous | out of thresholds |

Grid of draw: (n, blocks of 4 * BLOCK ids); program (r, b) leaves its best score and id, and the
launcher takes the first best of a row. Grid of thresholds: (n); the program of a row walks over
it once for the maximum and 16 times per active limit, settling 2 bits of the float's order-
preserving integer each time. Draw reads z once; thresholds reads it from memory once and then
from the second-level cache, so it is bound by up to 34 passes of one program over that.

Sums are integers, so no result depends on the order of a reduction or on other rows. Scores
agree with `rng.gumbel` to about 4e-6. Limits, checked by the launchers: float32, last dimension
contiguous.

Source: Salmon et al. (SC 2011) for Philox; radix selection is textbook.
"""

# Triton compiles these functions from their source; Python's types do not apply to them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _noise(w):
    """Gumbel noise of a 32-bit word. The hardware logarithm is poor near 1, so small u get the
    series of -log1p(-u) (terms to u**8: relative error below 1e-9 for u < 1/16)."""
    u = (w.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    series = 1.0 / 7.0 + u * 0.125
    series = 1.0 / 6.0 + u * series
    series = 0.2 + u * series
    series = 0.25 + u * series
    series = 1.0 / 3.0 + u * series
    series = 0.5 + u * series
    series = u * (1.0 + u * series)
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit
def _score(z_row, w, c, V, LANE: tl.constexpr):
    v = c * 4 + LANE
    z = tl.load(z_row + v, mask=v < V, other=float("-inf"))
    return z + _noise(w)


@triton.jit
def draw_kernel(
    z_ptr, seeds, positions, best_ptr, ids_ptr, z_stride, V, num_blocks,
    DOMAIN: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, b) scores ids 4 * BLOCK * b onwards of row r."""
    r = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    c = b * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + r)
    position = (tl.zeros([BLOCK], tl.int64) + tl.load(positions + r)).to(tl.uint32)
    domain = tl.full([BLOCK], DOMAIN, tl.uint32)
    sub = tl.full([BLOCK], SUB, tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c.to(tl.uint32), position, domain, sub)
    z_row = z_ptr + r * z_stride
    s0 = _score(z_row, w0, c, V, 0)
    s1 = _score(z_row, w1, c, V, 1)
    s2 = _score(z_row, w2, c, V, 2)
    s3 = _score(z_row, w3, c, V, 3)
    best = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
    first = tl.where(s3 == best, c * 4 + 3, V)
    first = tl.where(s2 == best, c * 4 + 2, first)
    first = tl.where(s1 == best, c * 4 + 1, first)
    first = tl.where(s0 == best, c * 4, first)
    tl.store(best_ptr + r * num_blocks + b, best)
    tl.store(ids_ptr + r * num_blocks + b, tl.minimum(tl.min(first), V - 1).to(tl.int64))


def draw(
    z: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    domain: int = 0,
    sub: int = 0,
    block: int = _BLOCK,
) -> torch.Tensor:
    """`rng.draw` in one pass over z: int64 [n].

    Args:
        z: float32 [n, V], rows contiguous.
        seeds: int64 [n].
        positions: int64 [n], in [0, 2**32).
    """
    _check(z)
    n, vocab = z.shape
    blocks = triton.cdiv(vocab, 4 * block)
    best = torch.empty(n, blocks, dtype=torch.float32, device=z.device)
    ids = torch.empty(n, blocks, dtype=torch.int64, device=z.device)
    if n:
        draw_kernel[(n, blocks)](
            z, seeds.contiguous(), positions.contiguous(), best, ids, z.stride(0), vocab, blocks,
            DOMAIN=domain, SUB=sub, BLOCK=block,
        )  # fmt: skip
    return ids.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _keys(z_row, at, V, BLOCK: tl.constexpr):
    """(values, order-preserving keys in [0, 2**32) as int64, in range?) of a run of a row."""
    v = at + tl.arange(0, BLOCK)
    z = tl.load(z_row + v, mask=v < V, other=float("-inf"))
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return z, key, v < V


@triton.jit
def _weight(z, peak, WEIGHTED: tl.constexpr):
    """An entry's mass as an integer, or 1 when entries are counted."""
    if WEIGHTED:
        # Rounded as torch does, halves to even: adding 2**23 leaves no fraction below it.
        x = tl.exp(z - peak) * 68719476736.0
        rounded = tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x)
        return rounded.to(tl.int64)
    else:
        return (z == z).to(tl.int64)


@triton.jit
def _largest(z_row, peak, need, floor, V, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t with weight(keys >= t and keys >= floor) >= need, 2 bits at a time.

    Each lane sums its own entries; lanes meet once a pass, so a chunk costs no reduction.
    """
    found = tl.sum(tl.zeros([1], tl.int64))
    for step in range(16):
        one = tl.full([1], 1, tl.int64) << (30 - 2 * step)
        digit = tl.sum(one)
        held1 = tl.zeros([BLOCK], tl.int64)
        held2 = tl.zeros([BLOCK], tl.int64)
        held3 = tl.zeros([BLOCK], tl.int64)
        for at in range(0, V, BLOCK):
            z, key, inside = _keys(z_row, at, V, BLOCK)
            weight = tl.where(inside & (key >= floor), _weight(z, peak, WEIGHTED), 0)
            held1 += tl.where(key >= found + digit, weight, 0)
            held2 += tl.where(key >= found + 2 * digit, weight, 0)
            held3 += tl.where(key >= found + 3 * digit, weight, 0)
        # What holds more than a larger digit cannot hold less, so the counts add up.
        steps = (tl.sum(held1) >= need).to(tl.int64) + (tl.sum(held2) >= need).to(tl.int64)
        found += (steps + (tl.sum(held3) >= need).to(tl.int64)) * digit
    return found


@triton.jit
def thresholds_kernel(
    z_ptr, top_k, top_p, low_ptr, z_stride, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r finds the smallest kept value of row r."""
    r = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + r * z_stride
    k = tl.load(top_k + r).to(tl.int64)
    p = tl.load(top_p + r)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, V, BLOCK):
        z, _, _ = _keys(z_row, at, V, BLOCK)
        best = tl.maximum(best, z)
    peak = tl.max(best)
    finite = (peak > float("-inf")) & (peak < float("inf"))
    peak = tl.where(finite, peak, 0.0)
    key = tl.sum(tl.zeros([1], tl.int64))
    if (k > 0) & (k < V):
        key = _largest(z_row, peak, k, key, V, False, BLOCK)
    if p < 1.0:
        total = tl.sum(tl.zeros([1], tl.int64))
        for at in range(0, V, BLOCK):
            z, own, inside = _keys(z_row, at, V, BLOCK)
            total += tl.sum(tl.where(inside & (own >= key), _weight(z, peak, True), 0))
        need = tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)
        if need > 0:
            key = _largest(z_row, peak, need, key, V, True, BLOCK)
    signed = (key - 2147483648).to(tl.int32)
    bits = tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed)
    low = bits.to(tl.float32, bitcast=True)
    tl.store(low_ptr + r, tl.where(key > 0, low, float("-inf")))


def thresholds(
    z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, block: int = 4 * _BLOCK
) -> torch.Tensor:
    """`truncate.thresholds` without a host sync: float32 [n].

    Args:
        z: float32 [n, V], rows contiguous.
        top_k: int32 [n], 0 or >= V for off.
        top_p: float32 [n], >= 1 for off.
    """
    _check(z)
    n, vocab = z.shape
    low = torch.empty(n, dtype=torch.float32, device=z.device)
    if n:
        thresholds_kernel[(n,)](
            z, top_k.contiguous(), top_p.contiguous(), low, z.stride(0), vocab, BLOCK=block,
            num_warps=16,
        )  # fmt: skip
    return low


def _check(z: torch.Tensor) -> None:
    if z.dtype != torch.float32 or z.dim() != 2 or z.stride(1) != 1:
        raise ValueError(f"logits must be float32 [n, V] with contiguous rows, got {z.dtype}")
