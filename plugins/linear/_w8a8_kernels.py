"""8-bit inputs and weights with scales per group of columns: quantize x, then multiply.

    y[t, n] = sum over groups g of (sum over k in g of q_x[t, k] q_w[n, k]) s_x[t, g] s_w[n, g]

| tensor | shape | dtype | in/out |
|---|---|---|---|
| x | [T, K] | bf16, fp16 or fp32, rows contiguous | in |
| q_x | [T, K] | uint8 holding e4m3 or int8 | out of quantize, in of product |
| s_x | [T, G] or [T, 1] | float32 | out of quantize, in of product |
| q_w, s_w | [N, K], [N, G] | uint8 holding e4m3 or int8; float32 | in |
| bias | [N] | any float; unused without HAS_BIAS | in |
| y | [T, N] | x's dtype | out |

Grids: quantize_groups (T, G / GROUPS), one program for GROUPS groups of a row; quantize_rows (T),
which reads its row twice; product (N / BLOCK_N, T / BLOCK_M), each walking K in steps that never
cross a group and adding scaled partial sums in float32. int8 sums are exact int32; e4m3 products
are exact and their sums in a step are float32 (native: the matrix unit's own, at most 128 terms).

Codes equal those of the reference in `_activations` bit for bit: correctly rounded divisions,
ties to even (by integer arithmetic, the same on every device), e4m3 saturating at 448. Tolerance
of the product against float64: rounding of y.

Source: quant.md 3.1, 3.2 and 7 of this project's specification.
"""

# Signatures keep tensors, strides and constants in groups:
# fmt: off

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cardcage.core.contracts import QuantTensor
from cardcage.plugins.linear._activations import Scheme
from cardcage.plugins.linear.triton_packed.kernels import decode_weight

# On an H200 in bf16, [14336, 4096] in groups of 128, 2026-12: 64 rows 37 us against 34 dense,
# 2048 rows 1295 us against about 420 with decoding.
DENSE_ROWS = 256
_DECODE_BYTES = 1024

_FP8_FLOOR = tl.constexpr(1.0 / (448.0 * 512.0))
_INT8_FLOOR = tl.constexpr(1e-12)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to an integer


@triton.jit
def _scale_of(amax, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    if FP8:
        scale = tl.maximum(tl.div_rn(amax, amax * 0.0 + 448.0), _FP8_FLOOR)
        if POWER_OF_TWO:
            bits = scale.to(tl.int32, bitcast=True)
            scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(tl.maximum(amax, _INT8_FLOOR), amax * 0.0 + 127.0)
    return scale


@triton.jit
def _code(value, FP8: tl.constexpr):
    """float32 -> the byte of the nearest code."""
    if FP8:
        size = tl.minimum(tl.abs(value), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # ties to even at mantissa bit 20; 120 = 127 - 7, the difference of the biases
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = ((size * 512.0 + _ROUND) - _ROUND).to(tl.int32)  # below 2^-6, steps of 2^-9
        byte = tl.where(size < 0.015625, small, normal)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (byte | sign).to(tl.uint8)
    value = (value + _ROUND) - _ROUND
    value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    return value.to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def quantize_groups(
    x, codes, scales, K, G, stride_x,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):
    """GROUPS groups of one row; a last group that is not full is filled with zeros."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(v), axis=1), FP8, POWER_OF_TWO)
    divided = tl.div_rn(v, tl.broadcast_to(scale[:, None], (GROUPS, GROUP)))
    tl.store(codes + row * K + k, _code(divided, FP8), mask=k < K)
    tl.store(scales + row * G + group, scale, mask=group < G)


@triton.jit
def quantize_rows(x, codes, scales, K, stride_x, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """One scale for a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + lane
        v = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(v))
    scale = _scale_of(tl.max(top, axis=0), FP8, False)
    for start in range(0, K, BLOCK):
        k = start + lane
        v = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
        divided = tl.div_rn(v, tl.broadcast_to(scale, (BLOCK,)))
        tl.store(codes + row * K + k, _code(divided, FP8), mask=k < K)
    tl.store(scales + row, scale)


@triton.jit
def _half(raw):
    """e4m3 bytes as float16, by moving bits; exact."""
    wide = raw.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def group_product(
    a, a_scale, w, w_scale, bias, y,
    T, N, K, stride_as, stride_ws, stride_y,
    GROUP: tl.constexpr, ROW_SCALES: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile of y. ROW_SCALES: x has one scale per row though the weight has groups."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < T, cols < N
    a_rows = a + rows.to(tl.int64)[:, None] * K
    w_rows = w + cols.to(tl.int64)[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        qa = tl.load(a_rows + k, mask=row_ok[:, None] & (k < K), other=0)
        qw = tl.load(w_rows + k, mask=col_ok[:, None] & (k < K), other=0)
        if FP8:
            if NATIVE:
                left = qa.to(tl.float8e4nv, bitcast=True)
                right = tl.trans(qw.to(tl.float8e4nv, bitcast=True))
                part = tl.dot(left, right, out_dtype=tl.float32)
            else:
                part = tl.dot(_half(qa), tl.trans(_half(qw)), out_dtype=tl.float32)
        else:
            left = qa.to(tl.int8, bitcast=True)
            right = tl.trans(qw.to(tl.int8, bitcast=True))
            part = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
        group = start // GROUP
        at = 0 if ROW_SCALES else group
        sa = tl.load(a_scale + rows.to(tl.int64) * stride_as + at, mask=row_ok, other=0.0)
        sw = tl.load(w_scale + cols.to(tl.int64) * stride_ws + group, mask=col_ok, other=0.0)
        total += part * sa[:, None] * sw[None, :]
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def quantize(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Dynamic symmetric codes of x [T, K] -> (uint8 [T, K], scales float32 [T, G] or [T, 1])."""
    if x.stride(1) != 1:
        x = x.contiguous()
    (t, k), fp8 = x.shape, scheme.family == "fp8"
    codes = torch.empty((t, k), dtype=torch.uint8, device=x.device)
    grouped = scheme.act.startswith("group")
    groups = -(-k // scheme.group) if grouped else 1
    scales = torch.empty((t, groups), dtype=torch.float32, device=x.device)
    if not t:
        return codes, scales
    if grouped:
        each = max(1, min(8, 1024 // scheme.group))
        quantize_groups[(t, -(-groups // each))](
            x, codes, scales, k, groups, x.stride(0), GROUP=scheme.group, GROUPS=each, FP8=fp8,
            POWER_OF_TWO=scheme.act.endswith("ue8m0"),
        )  # fmt: skip
    else:
        quantize_rows[(t,)](x, codes, scales, k, x.stride(0), FP8=fp8, BLOCK=1024)
    return codes, scales


def multiply(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, scheme: Scheme,
    bias: Tensor | None, dtype: torch.dtype, native: bool,
) -> Tensor:
    """Codes uint8 [T, K] and scales with weight uint8 [N, K], float32 [N, G] -> [T, N]."""
    (t, k), n = codes.shape, weight.shape[0]
    y = torch.empty((t, n), dtype=dtype, device=codes.device)
    if not t:
        return y
    block_m = 16 if t <= 16 else 32 if t <= 32 else 64 if t <= 256 else 128
    block_n = 32 if t <= 16 else 64 if t <= 256 else 128
    group_product[(-(-n // block_n), -(-t // block_m))](
        codes, scales, weight, weight_scale, y if bias is None else bias, y,
        t, n, k, scales.stride(0), weight_scale.stride(0), y.stride(0),
        GROUP=scheme.group, ROW_SCALES=scales.shape[1] == 1, FP8=scheme.family == "fp8",
        NATIVE=native, HAS_BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=min(scheme.group, 128),
        num_warps=4 if t <= 256 else 8, num_stages=3,
    )  # fmt: skip
    return y


def decode(codes: Tensor, scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """uint8 codes [R, K] and scales [R, G] or [R, 1] -> code * scale [R, K], rounded once."""
    rows, k = codes.shape
    out = torch.empty((rows, k), dtype=dtype, device=codes.device)
    decode_weight[(rows, -(-k // _DECODE_BYTES))](
        codes, scale, scale, out, k, k, codes.stride(0), scale.stride(0),
        FP8=scheme.family == "fp8", BITS=8, HALF=0, GROUP=scheme.group if scale.shape[1] > 1 else 0,
        HAS_ZERO=False, BLOCK_K=128, BYTES=_DECODE_BYTES,
    )  # fmt: skip
    return out


class GroupMatmul:
    """Groups of columns on GPUs: one launch to quantize x, one for the product.

    `native` uses the device's own e4m3 products; otherwise codes become halves in registers. From
    `DENSE_ROWS` rows, codes of both sides are decoded to x's dtype and torch multiplies them.
    """

    def __init__(self, scheme: Scheme, native: bool) -> None:
        self.scheme = scheme
        self.native = native
        self.layout_id = f"w8a8_groups.{scheme.family}.1"

    def prepare(self, record: QuantTensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """(weight uint8 [N, K], scale float32 [N, G]) on the device."""
        weight = record.parts["weight"].view(torch.uint8).to(device).contiguous()
        return weight, record.parts["scale"].to(device).contiguous()

    def run(
        self, handle: tuple[Tensor, Tensor], x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        codes, scales = quantize(x, self.scheme)
        if x.shape[0] < DENSE_ROWS:
            return multiply(codes, scales, *handle, self.scheme, bias, x.dtype, self.native)
        inputs = decode(codes, scales, self.scheme, x.dtype)
        return F.linear(inputs, decode(*handle, self.scheme, x.dtype), bias)
