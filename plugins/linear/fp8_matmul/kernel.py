"""y = (q_x q_w^T) s_x s_w + b with e4m3 codes on both sides.

| tensor | shape | dtype |
|---|---|---|
| x | [T, K] | compute dtype; its codes are made in every call |
| weight | [N, K] | float8_e4m3fn |
| scale | [N, 1] or [N, G] | float32; column k is in group k // g |
| y | [T, N] | x's dtype |

With one scale per row the scales leave the sum, and torch's scaled product runs it where the
device has FP8 arithmetic. With groups, y = sum over g of (q_x q_w^T) s_x[t, g] s_w[n, g], which
runs in Triton on GPUs (with halves in registers where there is no FP8 arithmetic). Emulation
multiplies the same codes (exact in float32 and bfloat16) and accumulates in float32, so it differs
from native by the order of the sum only.

Source: quant.md 3.1 of this project's specification; PyTorch's documentation of scaled products.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cardcage.core.contracts import LinearKernel, LinearNeed, QuantTensor
from cardcage.plugins.linear._activations import (
    Scheme,
    fp8_dynamic,
    merge_static,
    parse,
    spread,
    to_e4m3,
)

_FP8 = torch.float8_e4m3fn


def make_kernel(need: LinearNeed, options: Any, logger: logging.Logger) -> LinearKernel:
    """Native where the device passes a trial and the shape fits, else emulated (logged)."""
    scheme = parse(need.encoding)
    dtype = getattr(torch, need.dtype)
    why = "switched off by the option native" if options.native == "off" else ""
    if scheme.group >= 32 and need.device_type == "cuda" and find_spec("triton"):
        from cardcage.plugins.linear._w8a8_kernels import GroupMatmul

        return GroupMatmul(scheme, native=not why and scaled_product_works("cuda"))
    if not why and scheme.group:
        why = "scales per group of columns"
    if not why and (need.in_features % 16 or need.out_features % 16):
        why = "the shape is not a multiple of 16"
    if not why and need.device_type == "cpu":
        why = "hosts have no FP8 arithmetic"
    if not why and not scaled_product_works(need.device_type):
        why = f"torch's scaled product fails on this {need.device_type} device"
    if not why:
        rowwise = dtype == torch.bfloat16 and row_scaled_product_works(need.device_type)
        return ScaledMatmul(scheme, dtype, rowwise)
    logger.debug("fp8_matmul emulates %s: %s", need.encoding, why)
    return EmulatedMatmul(scheme, dtype, options.emulation == "streaming")


@cache
def scaled_product_works(device_type: str) -> bool:
    """One small product on the device, compared with its exact value."""
    a = torch.full((16, 32), 1.5, device=device_type).to(_FP8)
    b = torch.full((16, 32), -0.5, device=device_type).to(_FP8)
    one = torch.ones((), device=device_type)
    try:
        y = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool((y == -24.0).all())


@cache
def row_scaled_product_works(device_type: str) -> bool:
    """Whether the scaled product takes scales per row of both sides (bfloat16 output)."""
    a = torch.full((16, 32), 1.5, device=device_type).to(_FP8)
    b = torch.full((16, 32), -0.5, device=device_type).to(_FP8)
    left = torch.full((16, 1), 2.0, device=device_type)
    right = torch.full((1, 16), 0.5, device=device_type)
    right[0, 3] = 4.0
    try:
        y = torch._scaled_mm(a, b.t(), scale_a=left, scale_b=right, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool((y[:, 3] == -192.0).all()) and bool((y[:, :3] == -24.0).all())


@dataclass(slots=True)
class Handle:
    """What a weight becomes: `weight` e4m3 [N, K] or its values, `scale` [1, N] or [N, G]."""

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None
    bound: Tensor | None = None


class _Fp8Kernel:
    """The input side that both variants share."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype) -> None:
        self.scheme = scheme
        self.dtype = dtype

    def _handle(self, record: QuantTensor, device: torch.device) -> Handle:
        parts = {name: part.to(device) for name, part in record.parts.items()}
        static = parts.get("input_scale")
        bound = parts.get("input_bound")
        return Handle(
            weight=parts["weight"],
            scale=parts["scale"],
            input_scale=None if static is None else merge_static(static, None)[0],
            bound=None if bound is None else bound.amax().view(1),
        )

    def _codes(self, x: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
        """(e4m3 [T, K], scale [1], [T, 1] or [T, G])."""
        if handle.input_scale is not None:
            return to_e4m3(x.float() / handle.input_scale), handle.input_scale
        return fp8_dynamic(x.float(), self.scheme, handle.bound)


class ScaledMatmul(_Fp8Kernel):
    """torch's scaled product, for one scale per row (or fewer) on both sides.

    `rowwise`: the product applies the scales itself and rounds to bfloat16. Otherwise it has unit
    scales and float32 output, and scales and bias follow, rounded once, for any output dtype.
    """

    layout_id = "fp8_matmul.scaled.1"

    def __init__(self, scheme: Scheme, dtype: torch.dtype, rowwise: bool) -> None:
        super().__init__(scheme, dtype)
        self.rowwise = rowwise
        self._fused = None
        if scheme.act == "token" and find_spec("triton"):
            from cardcage.plugins.linear._w8a8_kernels import quantize

            self._fused = quantize

    def prepare(self, record: QuantTensor, device: torch.device) -> Handle:
        """Codes as they are, scales as a row."""
        handle = self._handle(record, device)
        handle.weight = handle.weight.contiguous()
        handle.scale = handle.scale.view(1, -1)
        self._one = torch.ones((), device=device)
        return handle

    def run(self, handle: Handle, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._fused is None:
            codes, scale = self._codes(x, handle)
        else:
            codes, scale = self._fused(x, self.scheme)
            codes = codes.view(_FP8)
        if self.rowwise:
            if scale.dim() == 1:
                scale = scale.expand(x.shape[0], 1).contiguous()
            y = torch._scaled_mm(
                codes, handle.weight.t(), scale_a=scale, scale_b=handle.scale,
                out_dtype=torch.bfloat16,
            )  # fmt: skip
            return y if bias is None else y.add_(bias)
        y = torch._scaled_mm(
            codes, handle.weight.t(), scale_a=self._one, scale_b=self._one,
            out_dtype=torch.float32,
        )  # fmt: skip
        y = y.mul_(scale).mul_(handle.scale)
        return (y if bias is None else y.add_(bias)).to(x.dtype)


class EmulatedMatmul(_Fp8Kernel):
    """The same numbers by ordinary float products, on any device.

    Row scales: products of codes, held in the compute dtype (float32 for float16, whose range the
    sums exceed). Groups: codes times scales, in float32.
    """

    def __init__(self, scheme: Scheme, dtype: torch.dtype, streaming: bool) -> None:
        super().__init__(scheme, dtype)
        self.streaming = streaming
        self.layout_id = f"fp8_matmul.{'streaming' if streaming else 'cached'}.1"
        wide = scheme.group or dtype == torch.float16
        self._math = torch.float32 if wide else dtype

    def prepare(self, record: QuantTensor, device: torch.device) -> Handle:
        """Decoded codes (times scales, with groups); the codes themselves when streaming."""
        handle = self._handle(record, device)
        if not self.streaming:
            handle.weight = self._operand(handle)
        if not self.scheme.group:
            handle.scale = handle.scale.view(1, -1)
        return handle

    def _operand(self, handle: Handle) -> Tensor:
        values = handle.weight.to(self._math)
        if not self.scheme.group:
            return values
        return values * spread(handle.scale, self.scheme.group, values.shape[1])

    def run(self, handle: Handle, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]."""
        codes, scale = self._codes(x, handle)
        weight = self._operand(handle) if self.streaming else handle.weight
        if self.scheme.group:
            inputs = codes.float() * spread(scale, self.scheme.group, x.shape[1])
            y = F.linear(inputs, weight)
        else:
            y = F.linear(codes.to(self._math), weight).float().mul_(scale).mul_(handle.scale)
        return (y if bias is None else y.add_(bias)).to(x.dtype)
