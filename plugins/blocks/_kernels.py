"""Triton kernels of the blocks: RMS norm (with residual add), q/k norm and rotation, gated act.

Formulas (rounding included: each kernel rounds where its torch form does, so both agree but for
the order of a sum):
  rms        x' = round(x + delta) if a delta is given, stored back;
             y = w * x' * rsqrt(mean(x'^2) + eps), in the variants of `_norms`
  norm_rope  per head: y = rms(x) if a weight is given; y = y cos + partner(y) sin on R channels
  gated      y = round(act(g)) * u for [g | u]

| tensor | shape | dtype | layout | in/out |
|---|---|---|---|---|
| rms x, delta | [T, n] | model's | rows may be strided | in (x out with delta) |
| norm_rope x | [T, heads, D] | model's | token stride free, heads contiguous | in |
| norm_rope cos, sin | [T, R] | float32 | as `Rope.tables` makes them | in |
| gated both | [T, 2 I] | model's | contiguous | in |
| outputs | as the input, [T, I] for gated | model's | contiguous | out |

Grids: rms one program per row; norm_rope one per (token, head); gated one per (token, 1024
columns). All are bound by memory: each input is read once, each output written once. Sums and
products are float32. Limits: n <= 32768 for rms, D <= 1024 for norm_rope; callers check.

Source: Triton language docs; the formulas are those of `_norms.rms_reference`, `Rope.rotate` and
`_mlp.GatedMlp`, which the tests compare with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROW = 32768
MAX_HEAD = 1024
_ACTS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2}
_COLUMNS = 1024


@triton.jit
def _rms_kernel(
    x_ptr, delta_ptr, w_ptr, out_ptr, x_stride, delta_stride, n, inverse_n, eps,
    HAS_DELTA: tl.constexpr, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0)
    wide = x.dtype
    dtype = out_ptr.dtype.element_ty
    x = x.to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + at, mask=mask, other=0.0)
        total = (x + delta.to(tl.float32)).to(wide)
        tl.store(x_ptr + row * x_stride + at, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) * inverse_n + eps)
    y = x * scale
    if ROUND_FIRST:
        y = y.to(dtype).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + at, (y * w).to(dtype), mask=mask)


def rms(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    round_first: bool,
    dtype: torch.dtype,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, n] (rows may be strided) -> norm, contiguous [T, n] in `dtype`; with `delta`,
    x += delta first.

    `weight` is what multiplies: 1 is already added where the variant wants it.
    """
    tokens, n = x.shape
    out = torch.empty((tokens, n), dtype=dtype, device=x.device)
    block = triton.next_power_of_2(n)
    _rms_kernel[(tokens,)](
        x, x if delta is None else delta, weight, out,
        x.stride(0), 0 if delta is None else delta.stride(0), n, 1.0 / n, eps,
        HAS_DELTA=delta is not None, ROUND_FIRST=round_first, BLOCK=block,
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
    )  # fmt: skip
    return out


@triton.jit
def _norm_rope_kernel(
    x_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, out_ptr, x_stride, num_heads, num_q_heads, eps,
    inverse_d,
    D: tl.constexpr, R: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = x_ptr + token * x_stride + head * D
    target = out_ptr + (token * num_heads + head) * D
    pair = tl.arange(0, HALF_BLOCK)
    in_pair = pair < R // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + R // 2
    a = tl.load(base + first, mask=in_pair, other=0.0)
    dtype = a.dtype
    a = a.to(tl.float32)
    b = tl.load(base + second, mask=in_pair, other=0.0).to(tl.float32)
    rest = R + tl.arange(0, REST_BLOCK)
    in_rest = rest < D
    c = a
    if R < D:
        c = tl.load(base + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(a * a, 0) + tl.sum(b * b, 0)
        if R < D:
            square += tl.sum(c * c, 0)
        scale = tl.rsqrt(square * inverse_d + eps)
        w_ptr = kw_ptr
        if head < num_q_heads:
            w_ptr = qw_ptr
        wa = tl.load(w_ptr + first, mask=in_pair, other=0.0).to(tl.float32)
        wb = tl.load(w_ptr + second, mask=in_pair, other=0.0).to(tl.float32)
        a *= scale
        b *= scale
        if ROUND_FIRST:
            a = a.to(dtype).to(tl.float32)
            b = b.to(dtype).to(tl.float32)
        a = (a * wa).to(dtype).to(tl.float32)
        b = (b * wb).to(dtype).to(tl.float32)
        if R < D:
            wc = tl.load(w_ptr + rest, mask=in_rest, other=0.0).to(tl.float32)
            c *= scale
            if ROUND_FIRST:
                c = c.to(dtype).to(tl.float32)
            c *= wc
    if R > 0:
        # Both halves of a pair have the same cosine; the second holds the positive sine.
        cos = tl.load(cos_ptr + token * R + first, mask=in_pair, other=0.0)
        sin = tl.load(sin_ptr + token * R + second, mask=in_pair, other=0.0)
        tl.store(target + first, (a * cos - b * sin).to(dtype), mask=in_pair)
        tl.store(target + second, (b * cos + a * sin).to(dtype), mask=in_pair)
    if R < D:
        tl.store(target + rest, c.to(dtype), mask=in_rest)


def norm_rope(
    x: torch.Tensor,
    num_q_heads: int,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    round_first: bool,
) -> torch.Tensor:
    """x [T, heads, D], heads contiguous -> [T, heads, D], each head normalised and rotated.

    Heads below `num_q_heads` take `q_weight`, the others `k_weight`; None leaves the norm out.
    `tables` None leaves the rotation out.
    """
    tokens, heads, size = x.shape
    out = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    if tables is None:
        cos = sin = out
        rotated = 0
    else:
        cos, sin = tables
        rotated = cos.shape[-1]
    weight_q = out if q_weight is None else q_weight
    weight_k = out if k_weight is None else k_weight
    _norm_rope_kernel[(tokens, heads)](
        x, cos, sin, weight_q, weight_k, out, x.stride(0), heads, num_q_heads, eps, 1.0 / size,
        D=size, R=rotated,
        HALF_BLOCK=triton.next_power_of_2(max(rotated // 2, 1)),
        REST_BLOCK=triton.next_power_of_2(max(size - rotated, 1)),
        NORM=q_weight is not None, ROUND_FIRST=round_first, INTERLEAVED=interleaved,
        num_warps=1 if size <= 256 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(both_ptr, out_ptr, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(both_ptr + row * 2 * size + at, mask=mask, other=0.0)
    dtype = gate.dtype
    g = gate.to(tl.float32)
    u = tl.load(both_ptr + row * 2 * size + size + at, mask=mask, other=0.0).to(tl.float32)
    if ACT == 0:
        y = g * tl.sigmoid(g)
    elif ACT == 1:
        y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        # tanh z = 2 sigmoid(2 z) - 1
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        y = g * tl.sigmoid(2.0 * z)
    y = y.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + at, (y * u).to(dtype), mask=mask)


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    """both [T, 2 I] contiguous: gate, then up -> act(gate) * up, [T, I]."""
    tokens, width = both.shape
    size = width // 2
    out = torch.empty((tokens, size), dtype=both.dtype, device=both.device)
    grid = (tokens, triton.cdiv(size, _COLUMNS))
    _gated_kernel[grid](both, out, size, ACT=_ACTS[activation], BLOCK=_COLUMNS, num_warps=4)
    return out
