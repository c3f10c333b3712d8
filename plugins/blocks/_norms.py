"""Norms as functions of x alone, shared by the norm blocks and by attention's q and k norms.

RMS: y = w * x * rsqrt(mean(x^2) + eps), the mean in float32. The variants differ only where the
model's dtype is narrower than float32:
  llama  the normalised x is rounded to the model's dtype, then multiplied by w
  fp32   multiplied in float32, rounded once (OLMo 2, GPT-OSS)
  1p     as fp32 with weight 1 + w (Gemma: checkpoints store w around zero)

Source: Zhang & Sennrich 2019; the roundings are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from cardcage.core.errors import UnsupportedModel
from cardcage.core.runtime.layers import BuildContext, ModelInput, Param

RMS_VARIANTS = ("llama", "fp32", "1p")


def rms_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
    """The formula in plain steps.

    Args:
        x: [..., n], any float dtype.
        weight: [n] as the checkpoint has it.
        eps: added to the mean square.
        variant: one of `RMS_VARIANTS`.
    """
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if variant == "llama":
        return weight.to(x.dtype) * normed.to(x.dtype)
    if variant == "1p":
        return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)
    return (normed * weight.to(torch.float32)).to(x.dtype)


class RmsNorm:
    """x [..., n] -> the same shape in the model's dtype, fresh memory.

    The last dimension is normalised. x may be wider than the model (the residual stream is
    float32), so the result's dtype is the model's.
    """

    __slots__ = (
        "_dtype", "_eps_tensor", "_inverse_n", "_kernel", "_n", "_weight", "eps", "round_first",
    )  # fmt: skip

    def __init__(self, ctx: BuildContext, name: str, n: int, eps: float, variant: str) -> None:
        if variant not in RMS_VARIANTS:
            raise UnsupportedModel(
                f"{name}: rms variant {variant!r} is none of {', '.join(RMS_VARIANTS)}"
            )
        # "llama" multiplies in the model's dtype; the others keep a float32 weight.
        dtype = None if variant == "llama" else torch.float32
        self._weight: Param = ctx.param(
            name, n, dtype, transform=_plus_one if variant == "1p" else None
        )
        self._n = n
        self._dtype = ctx.dtype
        self._inverse_n = 1.0 / n
        self.eps = eps
        self.round_first = variant == "llama"
        self._eps_tensor = torch.tensor(eps, dtype=torch.float32, device=ctx.device)
        self._kernel: Callable[..., torch.Tensor] | None = None
        if ctx.triton:
            from cardcage.plugins.blocks import _kernels

            self._kernel = _kernels.rms if n <= _kernels.MAX_ROW else None

    @property
    def weight(self) -> torch.Tensor:
        """What multiplies, [n]: 1 is added where the variant wants it."""
        assert self._weight.tensor is not None
        return self._weight.tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight.tensor
        if self._kernel is not None:
            rows = x if x.dim() == 2 else x.reshape(-1, self._n)
            normed = self._kernel(rows, weight, self.eps, self.round_first, self._dtype)
            return normed.view(x.shape)
        wide = x.to(torch.float32)
        normed = wide * self._inverse_rms(wide)
        if self.round_first:
            return normed.to(self._dtype).mul_(weight)
        return normed.mul_(weight).to(self._dtype)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """x [T, n] += delta in place; returns the norm of the new x."""
        if self._kernel is not None:
            weight = self._weight.tensor
            return self._kernel(x, weight, self.eps, self.round_first, self._dtype, delta)
        return self(x.add_(delta))

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        # Fewer passes than torch's rms_norm makes on a host: for [1, 576] on one core 11 us
        # against 18 us (torch 2.13).
        return torch.add(
            self._eps_tensor, (x * x).sum(-1, keepdim=True), alpha=self._inverse_n
        ).rsqrt_()


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return weight + 1.0


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w [+ b], in float32. x [..., n] -> the model's dtype."""

    __slots__ = ("_bias", "_dtype", "_eps", "_n", "_weight")

    def __init__(self, ctx: BuildContext, prefix: str, n: int, eps: float, bias: bool) -> None:
        self._weight = ctx.param(f"{prefix}.weight", n, torch.float32)
        self._bias = ctx.param(f"{prefix}.bias", n, torch.float32) if bias else None
        self._n = (n,)
        self._dtype = ctx.dtype
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self._bias is None else self._bias.tensor
        wide = x.to(torch.float32)
        return F.layer_norm(wide, self._n, self._weight.tensor, bias, self._eps).to(self._dtype)


class NormBlock:
    """A norm as a block of the interpreter: its second argument is not needed."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._norm = norm
        if isinstance(norm, RmsNorm):
            self.add_norm = norm.add_norm

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        return self._norm(x)
