"""Norms as functions of x alone, shared by the norm blocks and by attention's q and k norms.

RMS: y = w * x * rsqrt(mean(x^2) + eps), the mean in float32. The variants differ only where the
model's dtype is narrower than float32:
  llama  the normalised x is rounded to the model's dtype, then multiplied by w
  fp32   multiplied in float32, rounded once (OLMo 2, GPT-OSS)
  1p     as fp32 with weight 1 + w (Gemma: checkpoints store w around zero)

Source: Zhang & Sennrich 2019; the roundings are those of transformers 5.24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cardcage.core.errors import UnsupportedModel
from cardcage.core.runtime.layers import BuildContext, Param

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
    """x [..., n] -> the same shape and dtype, fresh memory. The last dimension is normalised."""

    __slots__ = ("_eps", "_eps_tensor", "_inverse_n", "_n", "_round_first", "_weight")

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
        self._n = (n,)
        self._inverse_n = 1.0 / n
        self._eps = eps
        self._eps_tensor = torch.tensor(eps, dtype=torch.float32, device=ctx.device)
        self._round_first = variant == "llama"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight.tensor
        if x.dtype == torch.float32:
            if x.is_cuda:
                return F.rms_norm(x, self._n, weight, self._eps)
            # On the host torch composes rms_norm of more passes than these: for [1, 576] on one
            # core 18 us against 11 us (torch 2.13).
            return (x * self._inverse_rms(x)).mul_(weight)
        wide = x.to(torch.float32)
        normed = wide * self._inverse_rms(wide)
        if self._round_first:
            return normed.to(x.dtype).mul_(weight)
        return normed.mul_(weight).to(x.dtype)

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(
            self._eps_tensor, (x * x).sum(-1, keepdim=True), alpha=self._inverse_n
        ).rsqrt_()


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return weight + 1.0


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w [+ b], in float32. x [..., n] -> the same shape, dtype."""

    __slots__ = ("_bias", "_eps", "_n", "_weight")

    def __init__(self, ctx: BuildContext, prefix: str, n: int, eps: float, bias: bool) -> None:
        self._weight = ctx.param(f"{prefix}.weight", n, torch.float32)
        self._bias = ctx.param(f"{prefix}.bias", n, torch.float32) if bias else None
        self._n = (n,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self._bias is None else self._bias.tensor
        wide = x.to(torch.float32)
        return F.layer_norm(wide, self._n, self._weight.tensor, bias, self._eps).to(x.dtype)
