"""Rotary position embedding: frequencies of every scaling type, and the rotation itself.

Angles, cosines and sines are float32 whatever the model's dtype, and the rotation runs in
float32. Frequencies depend on the model and on the context length the engine serves, never on
the length of one sequence, so that a key in the cache stays valid whatever follows it.

Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE); the Llama 3.1
model card; checked against transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import RopeSpec

SCALING_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = scaling.get("rope_type")
        raise UnsupportedModel(
            f"rope scaling {kind!r} needs a number in {key!r}, the config has {value!r}"
        )
    return float(value)


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair, and the factor on cosine and sine.

    Args:
        spec: the model's RoPE; `scaling["rope_type"]` is one of `SCALING_TYPES`.
        max_model_len: the longest sequence that will be served. LongRoPE takes its long factors
            when this exceeds the original context; dynamic NTK stretches its base to it.

    Returns:
        (float32 [dim / 2] on the host, attention factor).

    Raises:
        UnsupportedModel: unknown type or a missing number, with the key's name.
    """
    scaling = spec.scaling
    kind = scaling.get("rope_type", "default")
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponent)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / _number(scaling, "factor"), 1.0
    if kind == "dynamic":
        factor = _number(scaling, "factor")
        stretch = max(max_model_len, spec.max_position) / spec.max_position
        base = spec.theta * (factor * stretch - (factor - 1)) ** (spec.dim / (spec.dim - 2))
        return 1.0 / (base**exponent), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(spec, exponent)
    if kind == "longrope":
        return _longrope(spec, exponent, max_model_len)
    raise UnsupportedModel(
        f"rope_type {kind!r} is not supported; known are {', '.join(SCALING_TYPES)}"
    )


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, a smooth ramp between."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(spec: RopeSpec, exponent: torch.Tensor) -> tuple[torch.Tensor, float]:
    scaling = spec.scaling
    original = _number(scaling, "original_max_position_embeddings")
    if scaling.get("factor") is None:
        factor = spec.max_position / original
    else:
        factor = _number(scaling, "factor")

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention = magnitude(factor, mscale) / magnitude(factor, all_dim)
        else:
            attention = magnitude(factor)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` full turns within the original context."""
        return spec.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = pair_of(float(scaling.get("beta_fast") or 32))
    high = pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = spec.theta**exponent
    return ramp / (factor * wavelengths) + (1 - ramp) / wavelengths, float(attention)


def _longrope(
    spec: RopeSpec, exponent: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    scaling = spec.scaling
    original = _number(scaling, "original_max_position_embeddings")
    which = "long_factor" if max_model_len > original else "short_factor"
    factors = scaling.get(which)
    if not isinstance(factors, (list, tuple)) or len(factors) != spec.dim // 2:
        raise UnsupportedModel(
            f"longrope needs {spec.dim // 2} numbers in {which!r}, the config has {factors!r:.80}"
        )
    attention = scaling.get("attention_factor")
    if attention is None:
        ratio = scaling.get("factor")
        ratio = spec.max_position / original if ratio is None else float(ratio)
        attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    stretch = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (stretch * spec.theta**exponent), float(attention)


class Rope:
    """One named RoPE of a model. Stateless per step: the model makes its tables once a step."""

    def __init__(
        self, spec: RopeSpec, index: int, device: torch.device, max_model_len: int
    ) -> None:
        if spec.dim % 2 or spec.dim <= 0:
            raise UnsupportedModel(f"RoPE rotates an even number of channels, got {spec.dim}")
        if spec.pairing not in ("half", "interleaved"):
            raise UnsupportedModel(f"RoPE pairing {spec.pairing!r} is neither half nor interleaved")
        frequencies, factor = inverse_frequencies(spec, max_model_len)
        self.spec = spec
        self.index = index
        self.attention_factor = factor
        self._dim = spec.dim
        self._half = spec.dim // 2
        self._interleaved = spec.pairing == "interleaved"
        self._frequencies = frequencies.to(device)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> (cos, signed sin), each float32 [T, 1, dim].

        Laid out for `rotate`: the sine of a pair's first channel is negated.
        """
        angles = positions.to(torch.float32).view(-1, 1, 1) * self._frequencies
        cos, sin = angles.cos(), angles.sin_()
        if self.attention_factor != 1.0:
            cos.mul_(self.attention_factor)
            sin.mul_(self.attention_factor)
        if self._interleaved:
            cos, sin = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
            return cos.flatten(-2), sin.flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rotate(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [T, heads, D] -> the same shape and dtype, rotated, in fresh contiguous memory."""
        if x.dtype != torch.float32:
            return self.rotate(x.to(torch.float32), tables).to(x.dtype)
        if x.shape[-1] != self._dim:
            rotated = self._rotate_all(x.narrow(-1, 0, self._dim), tables)
            return torch.cat((rotated, x[..., self._dim :]), -1)
        return self._rotate_all(x, tables)

    def _rotate_all(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """x cos + partner sin. The partner of each channel is fetched in one pass."""
        cos, sin = tables
        if self._interleaved:
            partner = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = x.roll(self._half, -1)
        return (x * cos).addcmul_(partner, sin)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D], k [T, K, D], positions int64 [T] -> both rotated."""
        tables = self.tables(positions)
        return self.rotate(q, tables), self.rotate(k, tables)
