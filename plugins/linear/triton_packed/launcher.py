"""Prepares packed weights for the Triton product and picks the way for a number of rows.

Few rows: the packed product, bound by the bytes of the weight. Many rows (`dense_rows`): the weight
is decoded to a scratch matrix once per call and torch multiplies; that costs one pass over the
weight, then prefill costs what an unquantized layer costs. Both are fixed by the shape alone, so a
captured graph stays right.

Act-order: where the groups are of equal size, columns are sorted by group once and x is gathered in
that order in every call; unequal groups are refused at load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cardcage.core.contracts import LinearNeed, QuantTensor
from cardcage.core.errors import CheckpointError
from cardcage.plugins.linear.triton_packed.kernels import decode_weight, packed_product

_ENCODING = re.compile(r"(fp8|int8|int4|int2):(row|g\d+)((?:\+zero|\+gidx)*)")
_DECODE_BYTES = 1024


@dataclass(slots=True)
class Handle:
    """codes uint8 [N, bytes]; scale, zero [N, G]; perm int64 [K] or None."""

    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    perm: Tensor | None


class PackedKernel:
    """One instance per need. Codes below 8 bits are dealt anew for the kernel, see `kernels`."""

    layout_id = "triton_packed.2"

    def __init__(self, need: LinearNeed, options: Any) -> None:
        match = _ENCODING.fullmatch(need.encoding)
        assert match is not None, need.encoding
        family, group, flags = match.groups()
        self.fp8 = family == "fp8"
        self.bits = 8 if self.fp8 else int(family[3:])
        self.group = 0 if group == "row" else int(group[1:])
        self.has_zero, self.has_gidx = "+zero" in flags, "+gidx" in flags
        self.half = 1 << (self.bits - 1) if self.bits < 8 and not self.has_zero else 0
        self.dtype: torch.dtype = getattr(torch, need.dtype)
        # Crossing points on an H200 for [14336, 4096] in bf16, 2026-12: int4 116 us at 16 rows
        # packed against 110 decoded, int8 40 at 64 rows and 86 at 128 against 86 decoded.
        self.dense_rows = options.dense_rows or (17 if self.bits < 8 else 128)
        # Columns per step: within a group, and at least 16 bytes for the matrix units.
        self.block_k = 128 if self.group % 128 == 0 else min(self.group, 64)
        self.block_k = max(self.block_k, 16 * (8 // self.bits))

    def prepare(self, record: QuantTensor, device: torch.device) -> Handle:
        """Moves the parts; sorts columns by group for act-order.

        Raises:
            CheckpointError: act-order with groups of unequal size.
        """
        parts = record.parts
        perm = self._order(record, parts["gidx"].to(device)) if self.has_gidx else None
        zero = parts["zero"].to(device).contiguous() if self.has_zero else None
        scale = parts["scale"].to(device).contiguous()
        codes = (parts["weight"] if self.bits == 8 else parts["codes"]).to(device)
        codes = self._deal(codes.view(torch.uint8), record.shape[1], perm)
        return Handle(record.shape, codes, scale, zero, perm)

    def _order(self, record: QuantTensor, gidx: Tensor) -> Tensor:
        order = torch.argsort(gidx[0], stable=True)
        plain = torch.arange(record.shape[1], device=gidx.device) // self.group
        if gidx.shape[0] != 1 or not torch.equal(gidx[0, order].long(), plain):
            raise CheckpointError(
                f"{record.encoding}: act-order groups of unequal size cannot run packed; choose "
                'linear.use = "dequant_matmul"'
            )
        return order

    def _deal(self, codes: Tensor, k: int, perm: Tensor | None) -> Tensor:
        """A bit stream per row -> fields of blocks of `block_k` columns, in the order `perm`."""
        if self.bits == 8:
            return (codes if perm is None else codes[:, perm]).contiguous()
        per, mask = 8 // self.bits, (1 << self.bits) - 1
        fields = [codes >> (self.bits * i) & mask for i in range(per)]
        values = torch.stack(fields, dim=-1).flatten(1)[:, :k]
        if perm is not None:
            values = values[:, perm]
        values = F.pad(values, (0, -k % self.block_k))
        values = values.view(len(codes), -1, per, self.block_k // per)
        packed = values[:, :, 0].clone()
        for i in range(1, per):
            packed |= values[:, :, i] << (self.bits * i)
        return packed.flatten(1).contiguous()

    def run(self, handle: Handle, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        if handle.perm is not None:
            x = x.index_select(1, handle.perm)
        if x.shape[0] >= self.dense_rows:
            return F.linear(x, self.dense(handle, x.dtype), bias)
        return self.packed(handle, x, bias)

    def dense(self, handle: Handle, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`, columns in the handle's order."""
        n, k = handle.shape
        out = torch.empty((n, k), dtype=dtype, device=handle.codes.device)
        zero = handle.scale if handle.zero is None else handle.zero
        row_bytes = handle.codes.shape[1]
        decode_weight[(n, -(-row_bytes // _DECODE_BYTES))](
            handle.codes, handle.scale, zero, out, k, row_bytes, handle.codes.stride(0),
            handle.scale.stride(0), FP8=self.fp8, BITS=self.bits, HALF=self.half,
            GROUP=self.group, HAS_ZERO=handle.zero is not None, BLOCK_K=self.block_k,
            BYTES=_DECODE_BYTES,
        )  # fmt: skip
        return out

    def packed(self, handle: Handle, x: Tensor, bias: Tensor | None) -> Tensor:
        """The packed product for any number of rows."""
        t, (n, k) = x.shape[0], handle.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty((t, n), dtype=x.dtype, device=x.device)
        if not t:
            return y
        block_m = 16 if t <= 16 else 32 if t <= 32 else 64
        block_n = 32 if t <= 16 else 64
        zero = handle.scale if handle.zero is None else handle.zero
        packed_product[(-(-n // block_n), -(-t // block_m))](
            x, handle.codes, handle.scale, zero, y if bias is None else bias, y,
            t, n, k, handle.codes.shape[1],
            x.stride(0), handle.codes.stride(0), handle.scale.stride(0), y.stride(0),
            FP8=self.fp8, BITS=self.bits, HALF=self.half, GROUP=self.group,
            HAS_ZERO=handle.zero is not None, HAS_BIAS=bias is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=self.block_k,
            num_warps=4, num_stages=4,
        )  # fmt: skip
        return y
