"""The kernel of `torch_matmul`: holds the weight as it is, asks torch for the product."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from cardcage.core.contracts import QuantTensor

_WIDE_ROWS = 2048


class MatmulKernel:
    """Handle: the weight [N, K] on the device, contiguous, in the compute dtype."""

    layout_id = "dense"

    def prepare(self, record: QuantTensor, device: torch.device) -> torch.Tensor:
        """The record's weight itself where it is already there (tied weights share storage)."""
        return record.parts["weight"].to(device).contiguous()

    def run(
        self, handle: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, handle, bias)

    def run_wide(self, handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> float32 [T, N], see `wide_product`."""
        return wide_product(x, handle)


@cache
def wide_product_works(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device has a product with a wider result: one small one, against its value."""
    # 2 x 128 + 1 has no bfloat16: a result that was rounded on the way shows.
    a = torch.ones(16, 32, dtype=dtype, device=device_type)
    b = torch.zeros(16, 32, dtype=dtype, device=device_type)
    b[:, :2], b[:, 2] = 128.0, 1.0
    try:
        y = torch.mm(a, b.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return y.dtype == torch.float32 and bool((y == 257.0).all())


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> float32 [T, N], accumulated and kept in float32."""
    if weight.dtype == torch.float32:
        return F.linear(x.to(torch.float32), weight)
    if wide_product_works(x.device.type, x.dtype):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    # Widen the weight some rows at a time, small enough to stay in a core's cache.
    wide = x.to(torch.float32)
    out = wide.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _WIDE_ROWS):
        rows = slice(start, start + _WIDE_ROWS)
        out[:, rows] = F.linear(wide, weight[rows].to(torch.float32))
    return out
