"""y = s_x s_w (sum q_x q_w - z_x sum q_w) + b with int8 codes on both sides.

| tensor | shape | dtype |
|---|---|---|
| x | [T, K] | compute dtype; its codes are made in every call |
| weight | [G, N, g] | int8, zero padded: one slice of columns per scale (G = 1 for row scales) |
| scale | [G, N] | float32 |
| column sums | [N] | int32, for inputs with a zero point |
| y | [T, N] | x's dtype |

The inner sums are exact: int32 by `torch._int_mm`, or, where the device has none, float32
products of at most 1024 columns (1024 * 128 * 128 = 2^24). They are scaled in float32 and rounded
once to x's dtype. With groups, hosts multiply many rows in float32 instead, and GPUs run it all in
Triton (`_w8a8_kernels`). GPUs want at least 17 rows and multiples of 8, so shapes are padded there.

Source: quant.md 3.2 of this project's specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from cardcage.core.contracts import LinearKernel, LinearNeed, QuantTensor
from cardcage.plugins.linear._activations import (
    Scheme,
    int8_dynamic,
    int8_static,
    merge_static,
    parse,
    spread,
)

_EXACT_COLUMNS = 1024
_MIN_ROWS = 17  # cuBLAS refuses fewer
# From so many rows a sum per group costs more than decoding the weight: [3072, 576] in groups of
# 64 on one Xeon core, 2026-12, 256 rows 30 ms against 28, 1024 rows 125 ms against 45.
_WIDE_ROWS = 256


def make_kernel(need: LinearNeed) -> LinearKernel:
    """The kernel with the integer product that this device has."""
    scheme = parse(need.encoding)
    triton = need.device_type == "cuda" and find_spec("triton") is not None
    if scheme.group >= 32 and triton:
        from cardcage.plugins.linear._w8a8_kernels import GroupMatmul

        return GroupMatmul(scheme, native=True)
    native = integer_product_works(need.device_type)
    pad = need.device_type != "cpu" and native
    return Int8Kernel(scheme, native, pad, fused=triton and scheme.act == "token")


@cache
def integer_product_works(device_type: str) -> bool:
    """One small product on the device, compared with its exact value."""
    a = torch.full((32, 32), 100, dtype=torch.int8, device=device_type)
    b = torch.full((16, 32), -100, dtype=torch.int8, device=device_type)
    try:
        y = torch._int_mm(a, b.t())
    except (RuntimeError, NotImplementedError):
        return False
    return y.dtype == torch.int32 and bool((y == -320_000).all())


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 [T, K] x int8 [N, K] -> int32 [T, N], exactly, by float32 products."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for at in range(0, a.shape[1], _EXACT_COLUMNS):
        piece = slice(at, at + _EXACT_COLUMNS)
        total += F.linear(a[:, piece].float(), b[:, piece].float()).to(torch.int32)
    return total


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 [T, K] x int8 [N, K] -> int32 [T, N] by torch's integer product."""
    return torch._int_mm(a, b.t())


@dataclass(slots=True)
class Handle:
    """A prepared weight. `num_rows` is N without padding, `width` the columns of a slice."""

    weight: Tensor
    scale: Tensor
    num_rows: int
    width: int
    sums: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None


class Int8Kernel:
    """Exact int32 sums per group of columns, scaled in float32."""

    def __init__(self, scheme: Scheme, native: bool, pad: bool, fused: bool = False) -> None:
        self.scheme = scheme
        self.pad = pad
        self.layout_id = f"int8_matmul.{'int' if native else 'float'}.1"
        self._product: Callable[[Tensor, Tensor], Tensor] = (
            integer_product if native else float_product
        )
        self._fused = None
        if fused:
            from cardcage.plugins.linear._w8a8_kernels import quantize

            self._fused = quantize

    def prepare(self, record: QuantTensor, device: torch.device) -> Handle:
        """Slices of columns, padded where the device wants it; sums for zero points."""
        parts = {name: part.to(device) for name, part in record.parts.items()}
        weight, scale = parts["weight"], parts["scale"]
        n, k = record.shape
        width = self.scheme.group if scale.shape[1] > 1 else k
        slices = scale.shape[1]
        unit = 8 if self.pad else 1
        padded = F.pad(weight, (0, slices * width - k)).view(n, slices, width).transpose(0, 1)
        # torch 2.13 leaves the host's product of one column unwritten (2 cores, 2026-12)
        columns = max(-width % unit, 2 - width)
        padded = F.pad(padded, (0, columns, 0, -n % unit)).contiguous()
        handle = Handle(padded, scale.t().contiguous(), n, width)
        if self.scheme.act.endswith("asym"):
            handle.sums = weight.sum(dim=1, dtype=torch.int32)
        if "input_scale" in parts:
            merged = merge_static(parts["input_scale"], parts.get("input_zero"))
            handle.input_scale, handle.input_zero = merged
        return handle

    def run(self, handle: Handle, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]."""
        zero = handle.input_zero
        if handle.input_scale is not None:
            scale = handle.input_scale
            codes = int8_static(x.float(), scale, zero)
        elif self._fused is not None:
            codes, scale = self._fused(x, self.scheme)
            codes = codes.view(torch.int8)
        else:
            codes, scale, zero = int8_dynamic(x.float(), self.scheme)
        rows, columns = codes.shape
        slices, width = handle.weight.shape[0], handle.width
        if slices > 1 and rows >= _WIDE_ROWS and not self.pad:
            return self._wide(handle, codes, scale, bias, x.dtype)
        y: Tensor | None = None
        for i in range(slices):
            part = codes[:, i * width : min((i + 1) * width, columns)]
            sums = self._slice(part, handle.weight[i])[:rows, : handle.num_rows]
            if handle.sums is not None and zero is not None:
                sums = sums - zero.to(torch.int32) * handle.sums
            by = scale[:, i : i + 1] if scale.dim() == 2 and scale.shape[1] > 1 else scale
            term = sums.float().mul_(by).mul_(handle.scale[i])
            y = term if y is None else y.add_(term)
        assert y is not None
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def _wide(
        self, handle: Handle, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Many rows with groups: one float32 product of codes times scales."""
        n, k = handle.num_rows, codes.shape[1]
        scaled = handle.weight[:, :n, : handle.width] * handle.scale.unsqueeze(-1)
        weight = scaled.transpose(0, 1).reshape(n, -1)[:, :k]
        inputs = codes.float().mul_(spread(scale, handle.width, k))
        return F.linear(inputs, weight, None if bias is None else bias.float()).to(dtype)

    def _slice(self, codes: Tensor, weight: Tensor) -> Tensor:
        """One exact product; codes are padded to the weight's columns and the least rows."""
        missing = weight.shape[1] - codes.shape[1]
        few = max(0, _MIN_ROWS - codes.shape[0]) if self.pad else 0
        if missing or few:
            codes = F.pad(codes, (0, missing, 0, few))
        elif not codes.is_contiguous():
            codes = codes.contiguous()
        return self._product(codes, weight)
