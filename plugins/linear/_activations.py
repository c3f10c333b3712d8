"""Quantized inputs of 8-bit linear kernels: codes and scales of x, made in every call.

| scheme | scale | float8 | int8 |
|---|---|---|---|
| token | one per row of x | amax / 448 | amax / 127 |
| token_bound | the same, amax clamped to a bound | yes | no |
| token_asym | one per row, with a zero point | no | (max - min) / 255, range holds 0 |
| group, group_ue8m0 | one per row and group of columns (ue8m0: rounded up to 2^k) | yes | group |
| static | one for all, from the checkpoint | yes | yes |
| static_asym | the same with a zero point | no | yes |

Every scale depends on one token alone (or on none), so a row's result does not depend on what
else is in the batch. All in float32; true divisions, because a product with a reciprocal moves
codes by one. No host synchronisation.

Source: quant.md 2, 3.1, 3.2 and 7 of this project's specification.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
_FP8_FLOOR = 1.0 / (448.0 * 512.0)  # smallest scale: keeps x / scale finite for rows of zeros
_INT8_FLOOR = 1e-12
_ENCODING = re.compile(r"(fp8|int8):(row|g\d+)/(\w+)")


@dataclass(frozen=True, slots=True)
class Scheme:
    """An 8-bit encoding with quantized inputs: `group` columns share a weight scale, 0 = all."""

    family: str
    group: int
    act: str


@cache
def parse(encoding: str) -> Scheme:
    """Raises ValueError for an encoding without quantized inputs or with zero points."""
    match = _ENCODING.fullmatch(encoding)
    if match is None:
        raise ValueError(f"{encoding!r} is not an 8-bit encoding with quantized inputs")
    family, group, act = match.groups()
    return Scheme(family, 0 if group == "row" else int(group[1:]), act)


def spread(scale: Tensor, group: int, k: int) -> Tensor:
    """[R, G] -> [R, K] with column i in group i // group; [R, 1] stays."""
    return scale.repeat_interleave(group, dim=1)[:, :k] if scale.shape[1] > 1 else scale


def _group_amax(x: Tensor, group: int) -> Tensor:
    t, k = x.shape
    padded = F.pad(x.abs(), (0, -k % group))
    return padded.view(t, -1, group).amax(dim=2)


def ceil_power_of_two(scale: Tensor) -> Tensor:
    """The smallest 2^k >= scale, exactly (scale > 0)."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_dynamic(x: Tensor, scheme: Scheme, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """x float32 [T, K] -> (e4m3 [T, K], scale float32 [T, 1] or [T, G])."""
    grouped = scheme.act.startswith("group")
    amax = _group_amax(x, scheme.group) if grouped else x.abs().amax(dim=1, keepdim=True)
    if bound is not None:
        amax = torch.minimum(amax, bound)
    scale = (amax / E4M3_MAX).clamp_min(_FP8_FLOOR)
    if scheme.act == "group_ue8m0":
        scale = ceil_power_of_two(scale)
    return to_e4m3(x / spread(scale, scheme.group, x.shape[1])), scale


def int8_dynamic(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """x float32 [T, K] -> (int8 [T, K], scale [T, 1] or [T, G], zero point float32 [T, 1])."""
    if scheme.act == "token_asym":
        low = x.amin(dim=1, keepdim=True).clamp_max(0.0)
        high = x.amax(dim=1, keepdim=True).clamp_min(0.0)
        scale = ((high - low) / 255.0).clamp_min(_INT8_FLOOR)
        zero = (-128.0 - low / scale).round()
        return int8_static(x, scale, zero), scale, zero
    grouped = scheme.act == "group"
    amax = _group_amax(x, scheme.group) if grouped else x.abs().amax(dim=1, keepdim=True)
    scale = amax.clamp_min(_INT8_FLOOR) / 127.0
    codes = int8_static(x, spread(scale, scheme.group, x.shape[1]), None)
    return codes, scale, None


def int8_static(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """round(x / scale) + zero, clamped to int8; rounds halves to even."""
    codes = (x / scale).round()
    if zero is not None:
        codes = codes + zero
    return codes.clamp(-128, 127).to(torch.int8)


def merge_static(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Static scales of the components of a fused layer (one entry per row) -> one for all.

    They share one input, so the merged range covers each component's own. scale float32 [N, 1],
    zero int32 [N, 1] or None -> float32 [1] each.
    """
    if zero is None:
        return scale.amax().view(1), None
    equal = (scale == scale[0]).all() & (zero == zero[0]).all()
    points = zero.float()
    low, high = (scale * (-128.0 - points)).amin(), (scale * (127.0 - points)).amax()
    merged = (high - low) / 255.0
    offset = (-128.0 - low / merged).round()
    # equal components keep their own numbers: a merge would round them again
    return (
        torch.where(equal, scale[0, 0], merged).view(1),
        torch.where(equal, points[0, 0], offset).view(1),
    )
