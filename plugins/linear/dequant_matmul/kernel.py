"""y = x W^T + b with W decoded from its record.

| tensor | shape | dtype |
|---|---|---|
| x | [T, K] | compute dtype |
| W | [N, K] | decoded in float32, rounded once to the compute dtype |
| y | [T, N] | x's dtype |

cached: W is decoded in `prepare`, some rows at a time so that the float32 copy stays small.
streaming: the packed parts stay, and every call decodes all of W (its float32 copy is the peak).
Accumulation is torch's own; the result equals an unquantized layer holding decode(record).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from cardcage.core.contracts import LinearKernel, LinearNeed, QuantTensor
from cardcage.plugins.linear._torch_matmul import wide_product

# Elements decoded at once: 1 Mi float32 stay inside a core's cache and are enough for a GPU.
_CHUNK_ELEMS = {"cpu": 1 << 20}
_CHUNK_ELEMS_DEVICE = 1 << 26


def make_kernel(need: LinearNeed, options: Any) -> LinearKernel:
    """The kernel for a need; `options.mode` picks cached or streaming."""
    dtype = getattr(torch, need.dtype)
    return StreamingMatmul(dtype) if options.mode == "streaming" else CachedMatmul(dtype)


def decode_to(record: QuantTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The record's values [N, K] on `device` in `dtype`, decoded there in bounded pieces."""
    n, k = record.shape
    moved = replace(record, parts={p: t.to(device) for p, t in record.parts.items()})
    if record.encoding == "none":
        return moved.parts["weight"].to(dtype).contiguous()
    rows = max(1, _CHUNK_ELEMS.get(device.type, _CHUNK_ELEMS_DEVICE) // k)
    if rows >= n:
        return record.decode(moved).to(dtype)
    out = torch.empty((n, k), dtype=dtype, device=device)
    for start in range(0, n, rows):
        ids = torch.arange(start, min(start + rows, n), device=device)
        out[start : start + len(ids)] = record.decode_rows(moved, ids)
    return out


class CachedMatmul:
    """Decodes once; from then on it is an unquantized linear layer."""

    layout_id = "dequant_matmul.cached.1"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, record: QuantTensor, device: torch.device) -> torch.Tensor:
        """The weight [N, K] in the compute dtype on `device`."""
        return decode_to(record, device, self.dtype)

    def run(
        self, handle: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, handle, bias)

    def run_wide(self, handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> float32 [T, N], not rounded to x's dtype."""
        return wide_product(x, handle)


@dataclass(frozen=True, slots=True)
class _Packed:
    record: QuantTensor


class StreamingMatmul:
    """Keeps the packed parts and decodes in every call: least memory, most work."""

    layout_id = "dequant_matmul.streaming.1"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, record: QuantTensor, device: torch.device) -> _Packed:
        """The record with its parts on `device`."""
        parts = {name: tensor.to(device) for name, tensor in record.parts.items()}
        return _Packed(replace(record, parts=parts))

    def run(
        self, handle: _Packed, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        weight = handle.record.decode(handle.record).to(self.dtype)
        return F.linear(x, weight, bias)
