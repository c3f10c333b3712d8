"""y = x W^T with W in 8, 4 or 2 bits, decoded in registers; and W itself, decoded once.

    w[n, k] = (code[n, k] - zero[n, k // g]) * scale[n, k // g]

| tensor | shape | dtype | in/out |
|---|---|---|---|
| x | [T, K] | bf16, fp16 or fp32, rows contiguous | in |
| codes | [N, row bytes] | uint8: e4m3 bytes, int8 bytes, or fields of blocks (below) | in |
| scale | [N, G] | any float | in |
| zero | [N, G] | uint8, or int8 for 8-bit codes; unused without HAS_ZERO | in |
| bias | [N] | any float; unused without HAS_BIAS | in |
| y | [T, N] | x's dtype | out |

Below 8 bits the launcher deals each block of BLOCK_K columns anew (K padded with zero codes): with
P = 8 / bits fields in a byte and W = BLOCK_K / P, field p of byte j of a block is its column
p W + j. So x is read in contiguous runs of W, and codes are not shuffled.

Grid of the product: (N / BLOCK_N, T / BLOCK_M); program (i, j) walks K in steps of BLOCK_K, which
never crosses a group. Codes minus zeros are small integers (or e4m3 numbers), exact in every dtype
of x; the scale multiplies the float32 sum of a group. Bytes: codes once per row tile of x (bound by
memory for few rows). Order of sums depends on K and the group alone, never on T.

An e4m3 byte becomes a half by moving its bits (s eeee mmm -> s 0eeee mmm0000000) and a factor
2^8 for the difference of the biases: exact, subnormals included, on every architecture.

Tolerance against float64: 2^-7 in bf16, 2^-10 in fp16 (rounding of y), 1e-5 in fp32.
Limits, checked by the launcher: K % 32 = 0, groups of a row or multiples of 32.

Source: quant.md 1.8, 3.1 and 3.3 of this project's specification.
"""

# Signatures keep tensors, strides and constants in groups:
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _numbers(raw, FP8: tl.constexpr, BITS: tl.constexpr, field: tl.constexpr):
    """Bytes -> the numbers of one field, float16 for e4m3, int16 otherwise."""
    if FP8:
        wide = raw.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = half.to(tl.float16, bitcast=True) * 256.0
    elif BITS == 8:
        numbers = raw.to(tl.int8, bitcast=True).to(tl.int16)
    else:
        numbers = ((raw >> (BITS * field)) & ((1 << BITS) - 1)).to(tl.int16)
    return numbers


@triton.jit
def packed_product(
    x, codes, scale, zero, bias, y,
    T, N, K, row_bytes,
    stride_x, stride_codes, stride_scale, stride_y,
    FP8: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_M, BLOCK_N] of y. GROUP 0 = one scale per row. HALF: zero point of codes."""
    PER: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = BLOCK_K // PER
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, WIDTH)
    row_ok, col_ok = rows < T, cols < N
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    w_rows = codes + cols.to(tl.int64)[:, None] * stride_codes
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start // PER + lane
        byte_ok = at < row_bytes
        raw = tl.load(w_rows + at[None, :], mask=col_ok[:, None] & byte_ok[None, :], other=0)
        group = start // GROUP if GROUP > 0 else 0
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for field in tl.static_range(PER):
            k = start + field * WIDTH + lane
            a = tl.load(x_rows + k[None, :], mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
            w = _numbers(raw, FP8, BITS, field)
            if HAS_ZERO:
                z = tl.load(zero + cols.to(tl.int64) * stride_scale + group, mask=col_ok, other=0)
                w = w - z.to(tl.int16)[:, None]
            elif HALF > 0:
                w = w - HALF
            part = tl.dot(a, tl.trans(w.to(a.dtype)), part, input_precision="ieee")
        s = tl.load(scale + cols.to(tl.int64) * stride_scale + group, mask=col_ok, other=0.0)
        total += part * s.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def decode_weight(
    codes, scale, zero, w,
    K, row_bytes,
    stride_codes, stride_scale,
    FP8: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr, BYTES: tl.constexpr,
):
    """BYTES bytes of row n of the dense weight [N, K]: grid (N, row_bytes / BYTES). Rounds once."""
    PER: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = BLOCK_K // PER
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    raw = tl.load(codes + n * stride_codes + at, mask=at < row_bytes, other=0)
    for field in tl.static_range(PER):
        k = at // WIDTH * BLOCK_K + field * WIDTH + at % WIDTH
        ok = (at < row_bytes) & (k < K)
        group = k // GROUP if GROUP > 0 else k * 0
        value = _numbers(raw, FP8, BITS, field).to(tl.float32)
        if HAS_ZERO:
            value -= tl.load(zero + n * stride_scale + group, mask=ok, other=0).to(tl.float32)
        elif HALF > 0:
            value -= HALF
        s = tl.load(scale + n * stride_scale + group, mask=ok, other=0.0).to(tl.float32)
        tl.store(w + n * K + k, (value * s).to(w.dtype.element_ty), mask=ok)
