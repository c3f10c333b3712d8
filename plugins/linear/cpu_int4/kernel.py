"""y = x W^T + b with W as 4-bit codes, scales and offsets in groups of 32 along K.

The product is torch's `_weight_int4pack_mm_for_cpu`: w = (q - 8) s + z per group, with s and z
in bfloat16, so that a GGUF block becomes one group:

| encoding | groups | s | z |
|---|---|---|---|
| gguf:q4_0 | w = (q - 8) d | d | 0 |
| gguf:q4_1 | w = q d + m | d | m + 8 d |
| gguf:q4_k | w = q d S - dmin M, 8 sub-blocks of 32 | d S | 8 d S - dmin M |
| gguf:q8_0 | w = (16 h + l) d, h the high and l the low nibble | 16 d and d | 0 and 8 d |

q8_0 runs as a matrix of twice the width, x written twice: [x, x] [h, l]^T.

Handle: packed codes uint8 [N, K/2], scales bf16 [K/32, N, 2], and the dense copy [N, K], in
bfloat16 where the processor multiplies it and in float32 elsewhere. Bytes read at one row:
N K (1/2 + 1/8), a quarter of bf16; more rows re-use less well than a dense product does, so
from some rows on the dense copy runs.

Tolerance: s and z are rounded to bfloat16 (relative 2^-9 per group, like rounding every weight);
accumulation is float32; rows are independent, so a row's result does not depend on the others
while the same path is taken.

Source: torch's ATen op `_weight_int4pack_mm_for_cpu` (observed behaviour), GGUF block layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cardcage.core.contracts import DeviceFacts, QuantTensor
from cardcage.plugins.linear._torch_matmul import wide_product
from cardcage.plugins.linear.dequant_matmul.kernel import decode_to

GROUP = 32
# Entries of a row of logits that are computed again in float32: a bf16 step is 1/256 of the
# value, so the true maximum lies far inside the 64 largest rounded ones.
_REFINED = 64
# Most rows that run packed. Measured with 2 threads on the shapes of a 135M model. BF16
# instructions (Zen 4, 2026-11): packed wins 2.4 times at one row, loses 1.3 times at 16. Tiles too
# (Sapphire Rapids class Xeon, 2026-12): packed wins 2 times at one row, is even at 4, loses 2
# times at 8. Neither (Xeon 2.8 GHz with AVX-512, 2026-12): packed beats float32 up to about 40.
_ROWS_AMX, _ROWS_BF16, _ROWS_PLAIN = 4, 8, 32
_DENSE_SHARE = 256
# Rows whose codes are widened to int32 at once; torch packs 64 rows together, so pieces that are
# multiples of 64 rows can be packed apart.
_PIECE_ELEMS = 1 << 24
_NIBBLES = 0x0F0F0F0F0F0F0F0F


@dataclass(slots=True)
class Int4Weight:
    """`codes` and `scales` as the op wants them; `dense` None when only packed rows run."""

    codes: Tensor
    scales: Tensor
    dense: Tensor | None
    doubled: bool
    rows: int


def rows_limit(features: frozenset[str]) -> int:
    """Most rows that run packed on a processor with these instruction sets."""
    if "amx_bf16" in features:
        return _ROWS_AMX
    return _ROWS_BF16 if "avx512_bf16" in features else _ROWS_PLAIN


class CpuInt4Kernel:
    """Packs at load; picks the product by the number of rows."""

    layout_id = "cpu_int4.1"

    def __init__(self, options: Any, facts: DeviceFacts | None) -> None:
        features = facts.features if facts is not None else frozenset()
        self.options = options
        self.rows = rows_limit(features) if options.packed_rows is None else options.packed_rows
        bf16 = bool(features & {"amx_bf16", "avx512_bf16"})
        self.dense_dtype = torch.bfloat16 if bf16 else torch.float32
        self.memory_bytes = facts.total_bytes if facts is not None else 0

    def prepare(self, record: QuantTensor, device: torch.device) -> Int4Weight:
        """Packed codes, scales and maybe a dense copy; the record's parts are not kept."""
        n, _ = record.shape
        codes, scale, zero = _SPLIT[record.encoding](record.parts["packed"])
        pairs = torch.stack((scale.view(n, -1).t(), zero.view(n, -1).t()), dim=-1)
        doubled = record.encoding == "gguf:q8_0"
        return Int4Weight(
            codes=_pack(codes.view(n, -1)),
            scales=pairs.to(torch.bfloat16).contiguous(),
            dense=decode_to(record, device, self.dense_dtype) if self._dense(record) else None,
            doubled=doubled,
            rows=self.rows // 2 if doubled else self.rows,
        )

    def _dense(self, record: QuantTensor) -> bool:
        if self.options.dense != "auto":
            return bool(self.options.dense == "always")
        n, k = record.shape
        return n * k * self.dense_dtype.itemsize <= self.memory_bytes // _DENSE_SHARE

    def run(self, handle: Int4Weight, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] bfloat16 -> [T, N] bfloat16."""
        if handle.dense is not None and x.shape[0] > handle.rows:
            if handle.dense.dtype == x.dtype:
                return F.linear(x, handle.dense, bias)
            wide = F.linear(x.float(), handle.dense)
            return (wide if bias is None else wide.add_(bias)).to(x.dtype)
        if x.shape[0] == 0:
            return x.new_empty(0, handle.scales.shape[1])
        x = torch.cat((x, x), dim=-1) if handle.doubled else x.contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, handle.codes, GROUP, handle.scales)
        return y if bias is None else y.add_(bias)

    def run_wide(self, handle: Int4Weight, x: Tensor) -> Tensor:
        """x [T, K] bfloat16 -> float32 [T, N].

        The packed product rounds its result to bfloat16, which ties neighbours near the top.
        So the largest `_REFINED` of each row are computed again from the dense copy: what can
        win is exact to float32, the rest keeps the rounding.
        """
        if handle.dense is None:
            return self.run(handle, x).to(torch.float32)
        if x.shape[0] > handle.rows:
            return wide_product(x, handle.dense)
        y = self.run(handle, x).to(torch.float32)
        top = y.topk(min(_REFINED, y.shape[1]), dim=-1).indices
        rows = handle.dense[top].to(torch.float32)  # [T, R, K]
        exact = torch.bmm(rows, x.to(torch.float32).unsqueeze(-1)).squeeze(-1)
        return y.scatter_(1, top, exact)


def _pack(codes: Tensor) -> Tensor:
    """uint8 codes [N, K] of 0..15 -> the op's packed layout, some rows at a time."""
    n, k = codes.shape
    step = max(64, _PIECE_ELEMS // k // 64 * 64)
    pieces = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes[i : i + step].int(), 1)
        for i in range(0, n, step)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _nibbles(qs: Tensor) -> Tensor:
    """uint8 [n, b] -> [n, 2 b]: low nibbles, then high ones; eight bytes at a time."""
    words = qs.clone(memory_format=torch.contiguous_format).view(torch.int64)
    return torch.cat((words & _NIBBLES, (words >> 4) & _NIBBLES), dim=1).view(torch.uint8)


def _half(blocks: Tensor, at: int) -> Tensor:
    return (
        blocks[:, at : at + 2]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float16)
        .float()
    )


def _split_q4_0(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b = packed.reshape(-1, 18)
    d = _half(b, 0)
    return _nibbles(b[:, 2:]), d, torch.zeros_like(d)


def _split_q4_1(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b = packed.reshape(-1, 20)
    d = _half(b, 0)
    return _nibbles(b[:, 4:]), d, _half(b, 2) + 8 * d


def _split_q4_k(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b = packed.reshape(-1, 144)
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1).float()
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1).float()
    d = _half(b, 0) * scales
    codes = _nibbles(b[:, 16:].reshape(-1, 32))
    return codes, d, 8 * d - _half(b, 2) * mins


def _split_q8_0(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = packed.shape[0]
    b = packed.reshape(-1, 34)
    d = _half(b, 0).view(n, -1)
    # Adding 128 turns the signed byte into an unsigned one, whose high nibble is h + 8.
    words = (b[:, 2:].contiguous() ^ 128).view(torch.int64)
    high = ((words >> 4) & _NIBBLES).view(torch.uint8).view(n, -1)
    low = (words & _NIBBLES).view(torch.uint8).view(n, -1)
    zero = torch.cat((torch.zeros_like(d), 8 * d), dim=1)
    return torch.cat((high, low), dim=1), torch.cat((16 * d, d), dim=1), zero


_SPLIT = {
    "gguf:q4_0": _split_q4_0,
    "gguf:q4_1": _split_q4_1,
    "gguf:q4_k": _split_q4_k,
    "gguf:q8_0": _split_q8_0,
}
