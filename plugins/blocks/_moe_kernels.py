"""Triton kernels for experts: two grouped products over tokens sorted by expert, and the sum.

  hidden[r] = act(W_g x_t) * (W_u x_t)     r-th (token, choice) pair in expert order, t its token
  rows[p]   = W_d hidden[r]                p = order[r], the pair's place in token order
  y[t]      = sum_j w[t, j] rows[t k + j]  in float32

| tensor | shape | dtype | in/out |
|---|---|---|---|
| x | [T, H] | model's, row stride free | in |
| w13, w2 | [E, 2 I, H], [E, H, I] | model's, contiguous | in |
| order | [T k] | int64: pairs sorted by expert | in |
| ends, tile_ends | [E] | int32: running totals of pairs and of row tiles | in |
| tile_expert | [tiles] | int32: the expert of each row tile, E for none | in |
| hidden, rows, y | [T k, I], [T k, H], [T, H] | model's | out |

Grid of the products: (row tiles, column tiles); a row tile belongs to one expert. The number of
row tiles is an upper bound known on the host (T k / BM + min(E, T k)), so nothing is read back;
surplus tiles leave at once. Each expert with tokens is read once per row tile: for few tokens the
products are bound by the bytes of the experts chosen, for many by arithmetic. Sums are float32.

Source: the tile-per-expert scheme is that of Gale et al. 2022 (MegaBlocks); Triton's matrix
product tutorial; the formula is that of `_moe.by_expert`, which the tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ACTS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The pairs of one step in expert order, cut into row tiles. Device tensors."""

    order: torch.Tensor
    ends: torch.Tensor
    tile_ends: torch.Tensor
    tile_expert: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of the products and how a program runs."""

    rows: int
    columns: int
    depth: int
    warps: int


def shape(pairs: int, num_experts: int, dtype: torch.dtype) -> Shape:
    """Enough rows per tile to feed the matrix unit, no more than an expert is likely to get."""
    mean = pairs // num_experts
    if dtype.itemsize > 2:
        return Shape(16 if mean <= 16 else 64, 32, 32, 4)
    # The best of 15 shapes on an H200, 2026-12-01: bfloat16, 128 experts of 2048 x 768 and 8 of
    # 4096 x 7168, 1 to 8192 tokens.
    if mean <= 16:
        return Shape(16, 64, 128, 4)
    return Shape(64, 64, 64, 4) if mean <= 64 else Shape(128, 128, 64, 8)


def plan(ids: torch.Tensor, num_experts: int, rows: int) -> Tiles:
    """ids int64 [T, k] -> tiles of `rows` pairs, without a host sync."""
    pairs = ids.numel()
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    tile_ends = torch.cumsum((counts + rows - 1) // rows, 0, dtype=torch.int32)
    tiles = torch.arange(pairs // rows + min(num_experts, pairs), device=ids.device)
    tile_expert = torch.searchsorted(tile_ends, tiles, right=True, out_int32=True)
    return Tiles(order, ends, tile_ends, tile_expert)


@triton.jit
def _tile_rows(tile, expert, ends_ptr, tile_ends_ptr, BM: tl.constexpr):
    """The rows (in expert order) of a tile, and which of them exist."""
    before = tl.maximum(expert - 1, 0)
    first_row = tl.where(expert > 0, tl.load(ends_ptr + before), 0)
    first_tile = tl.where(expert > 0, tl.load(tile_ends_ptr + before), 0)
    rows = first_row + (tile - first_tile) * BM + tl.arange(0, BM)
    return rows, rows < tl.load(ends_ptr + expert)


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, out_ptr, order_ptr, ends_ptr, tile_ends_ptr, tile_expert_ptr, x_stride,
    H, I, NUM_EXPERTS, TOP_K: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < NUM_EXPERTS:
        rows, real = _tile_rows(tile, expert, ends_ptr, tile_ends_ptr, BM)
        tokens = tl.load(order_ptr + rows, mask=real, other=0) // TOP_K
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        in_columns = columns < I
        gate_ptr = w_ptr + expert.to(tl.int64) * (2 * I * H) + columns[None, :].to(tl.int64) * H
        up_ptr = gate_ptr + I.to(tl.int64) * H
        a_ptr = x_ptr + tokens[:, None] * x_stride
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for start in range(0, H, BK):
            k = start + tl.arange(0, BK)
            in_k = k < H
            a = tl.load(a_ptr + k[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
            here = in_k[:, None] & in_columns[None, :]
            wg = tl.load(gate_ptr + k[:, None], mask=here, other=0.0)
            wu = tl.load(up_ptr + k[:, None], mask=here, other=0.0)
            gate = tl.dot(a, wg, gate, input_precision="ieee")
            up = tl.dot(a, wu, up, input_precision="ieee")
        dtype = out_ptr.dtype.element_ty
        g = gate.to(dtype).to(tl.float32)
        u = up.to(dtype).to(tl.float32)
        if ACT == 0:
            y = g * tl.sigmoid(g)
        elif ACT == 1:
            y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
        else:
            y = g * tl.sigmoid(2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g))
        y = y.to(dtype).to(tl.float32) * u
        target = out_ptr + rows[:, None].to(tl.int64) * I + columns[None, :]
        tl.store(target, y.to(dtype), mask=real[:, None] & in_columns[None, :])


@triton.jit
def _down_kernel(
    hidden_ptr, w_ptr, out_ptr, order_ptr, ends_ptr, tile_ends_ptr, tile_expert_ptr,
    H, I, NUM_EXPERTS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < NUM_EXPERTS:
        rows, real = _tile_rows(tile, expert, ends_ptr, tile_ends_ptr, BM)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        in_columns = columns < H
        b_ptr = w_ptr + expert.to(tl.int64) * (H * I) + columns[None, :].to(tl.int64) * I
        a_ptr = hidden_ptr + rows[:, None].to(tl.int64) * I
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, I, BK):
            k = start + tl.arange(0, BK)
            in_k = k < I
            a = tl.load(a_ptr + k[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
            b = tl.load(b_ptr + k[:, None], mask=in_k[:, None] & in_columns[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        place = tl.load(order_ptr + rows, mask=real, other=0)
        target = out_ptr + place[:, None] * H + columns[None, :]
        dtype = out_ptr.dtype.element_ty
        tl.store(target, total.to(dtype), mask=real[:, None] & in_columns[None, :])


@triton.jit
def _sum_kernel(rows_ptr, w_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOP_K):
        row = tl.load(rows_ptr + (token * TOP_K + j) * H + at, mask=mask, other=0.0)
        total += tl.load(w_ptr + token * TOP_K + j) * row.to(tl.float32)
    tl.store(out_ptr + token * H + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """x [T, H], ids int64 and weights float32 [T, k] -> [T, H]."""
    num_experts, double, width = w13.shape
    size, (tokens, top_k) = double // 2, ids.shape
    cut = shape(ids.numel(), num_experts, x.dtype)
    tiles = plan(ids, num_experts, cut.rows)
    index = (tiles.order, tiles.ends, tiles.tile_ends, tiles.tile_expert)
    count = tiles.tile_expert.numel()
    sizes = {"BM": cut.rows, "BN": cut.columns, "BK": cut.depth}
    launch = {**sizes, "num_warps": cut.warps, "num_stages": 3}
    hidden = torch.empty((tokens * top_k, size), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(count, triton.cdiv(size, cut.columns))](
        x, w13, hidden, *index, x.stride(0), width, size, num_experts,
        TOP_K=top_k, ACT=_ACTS[activation], **launch,
    )  # fmt: skip
    out = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    _down_kernel[(count, triton.cdiv(width, cut.columns))](
        hidden, w2, out, *index, width, size, num_experts, **launch,
    )  # fmt: skip
    y = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    _sum_kernel[(tokens, triton.cdiv(width, 1024))](
        out, weights.contiguous(), y, width, TOP_K=top_k, BLOCK=1024
    )
    return y
