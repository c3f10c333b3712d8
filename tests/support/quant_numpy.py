"""Quantized checkpoint layouts in plain numpy loops, written from their descriptions alone.

Writers make the tensors of a layer from integer codes; readers turn them back into numbers one
element at a time. Nothing here shares code with the plugins under test.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch

from cardcage.core.contracts import LinearDesc, PluginContext, QuantNeed, TensorMeta

F32 = np.float32


# ---- numbers ------------------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    """The value of one e4m3fn byte: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(b) for b in range(256)])
_MAGNITUDES = [e4m3(b) for b in range(127)]  # ascending


def nearest_e4m3(x: float) -> int:
    """The byte nearest to x, ties to the even mantissa, saturating."""
    magnitude = min(abs(x), 448.0)
    high = min(bisect.bisect_left(_MAGNITUDES, magnitude), 126)
    near = (max(high - 1, 0), high)
    best = min(near, key=lambda b: (abs(_MAGNITUDES[b] - magnitude), b & 1))
    return best | (0x80 if np.signbit(x) else 0)


# ---- bits ---------------------------------------------------------------------------------------


def get_bits(words: Any, first: int, bits: int) -> int:
    """`bits` bits from bit `first` of a sequence of 32-bit words, least significant first."""
    value = 0
    for i in range(bits):
        at = first + i
        value |= (int(words[at // 32]) >> (at % 32) & 1) << i
    return value


def put_bits(words: list[int], first: int, bits: int, value: int) -> None:
    for i in range(bits):
        at = first + i
        words[at // 32] |= (int(value) >> i & 1) << (at % 32)


def int32(words: Any) -> np.ndarray:
    return np.array(words, dtype=np.uint32).astype(np.uint32).view(np.int32)


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] codes -> int32 [R, ceil(C * bits / 32)], a bit stream along each row."""
    rows, cols = codes.shape
    out = []
    for r in range(rows):
        words = [0] * -(-cols * bits // 32)
        for c in range(cols):
            put_bits(words, c * bits, bits, codes[r, c])
        out.append(words)
    return int32(out)


def unpack_rows(words: np.ndarray, bits: int, cols: int) -> np.ndarray:
    unsigned = words.view(np.uint32) if words.dtype == np.int32 else words
    return np.array([[get_bits(row, c * bits, bits) for c in range(cols)] for row in unsigned])


# ---- layouts ------------------------------------------------------------------------------------


def affine(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, group_of: Any) -> np.ndarray:
    """codes [N, K], zero and scale [N, G] -> (code - zero) * scale in float32, one by one."""
    n, k = codes.shape
    out = np.zeros((n, k), F32)
    for i in range(n):
        for j in range(k):
            g = group_of(j)
            out[i, j] = F32(int(codes[i, j]) - int(zero[i, g])) * F32(scale[i, g])
    return out


def gptq_tensors(
    codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, bits: int, v1: bool = True
) -> dict[str, np.ndarray]:
    """codes [N, K], zero and scale [N, G] -> qweight, qzeros, scales."""
    stored = (zero - 1) % (1 << bits) if v1 else zero
    return {
        "qweight": np.ascontiguousarray(pack_rows(codes, bits).T),
        "qzeros": pack_rows(np.ascontiguousarray(stored.T), bits),
        "scales": np.ascontiguousarray(scale.T),
    }


def read_gptq(tensors: dict[str, np.ndarray], bits: int, group: int, v1: bool = True) -> np.ndarray:
    n = tensors["qweight"].shape[1]
    k = tensors["qweight"].shape[0] * 32 // bits
    codes = unpack_rows(np.ascontiguousarray(tensors["qweight"].T), bits, k)
    zero = unpack_rows(tensors["qzeros"], bits, n).T
    if v1:
        zero = (zero + 1) % (1 << bits)
    g_idx = tensors.get("g_idx")
    return affine(
        codes,
        zero,
        tensors["scales"].T.astype(F32),
        lambda j: j // group if g_idx is None else int(g_idx[j]),
    )


AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


def awq_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, N] -> int32 [R, N / pf]: field i of word c holds column pf c + order[i]."""
    order = AWQ_ORDER[bits]
    rows, cols = codes.shape
    out = np.zeros((rows, cols // len(order)), np.uint32)
    for r in range(rows):
        for c in range(out.shape[1]):
            word = 0
            for i, column in enumerate(order):
                word |= int(codes[r, c * len(order) + column]) << (bits * i)
            out[r, c] = word
    return out.view(np.int32)


def awq_unpack(words: np.ndarray, bits: int) -> np.ndarray:
    order = AWQ_ORDER[bits]
    out = np.zeros((words.shape[0], words.shape[1] * len(order)), np.int64)
    for r, row in enumerate(words.view(np.uint32)):
        for c, word in enumerate(row):
            for i, column in enumerate(order):
                out[r, c * len(order) + column] = int(word) >> (bits * i) & ((1 << bits) - 1)
    return out


def awq_tensors(
    codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, bits: int
) -> dict[str, np.ndarray]:
    return {
        "qweight": awq_pack(np.ascontiguousarray(codes.T), bits),
        "qzeros": awq_pack(np.ascontiguousarray(zero.T), bits),
        "scales": np.ascontiguousarray(scale.T),
    }


def read_awq(tensors: dict[str, np.ndarray], bits: int, group: int) -> np.ndarray:
    codes, zero = awq_unpack(tensors["qweight"], bits).T, awq_unpack(tensors["qzeros"], bits).T
    return affine(codes, zero, tensors["scales"].T.astype(F32), lambda j: j // group)


def ct_tensors(
    codes: np.ndarray, zero: np.ndarray | None, scale: np.ndarray, bits: int
) -> dict[str, np.ndarray]:
    """Unsigned codes [N, K] (value + 2^(bits - 1)) -> the tensors of pack-quantized."""
    out = {
        "weight_packed": pack_rows(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zero is not None:
        packed = pack_rows(np.ascontiguousarray(zero.T), bits)
        out["weight_zero_point"] = np.ascontiguousarray(packed.T)
    return out


def read_ct(tensors: dict[str, np.ndarray], bits: int, group: int) -> np.ndarray:
    n, k = (int(v) for v in tensors["weight_shape"])
    half = 1 << (bits - 1)
    codes = unpack_rows(tensors["weight_packed"], bits, k) - half
    scale = tensors["weight_scale"].astype(F32)
    zero = np.zeros(scale.shape, np.int64)
    if "weight_zero_point" in tensors:
        words = np.ascontiguousarray(tensors["weight_zero_point"].T)
        zero = unpack_rows(words, bits, n).T - half
    g_idx = tensors.get("weight_g_idx")
    return affine(codes, zero, scale, lambda j: j // group if g_idx is None else int(g_idx[j]))


def scaled(values: np.ndarray, scale: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """values [N, K] times a grid of scales for blocks of rows x cols, one by one in float32."""
    out = np.zeros(values.shape, F32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = F32(values[i, j]) * F32(scale[i // rows, j // cols])
    return out


# ---- between numpy, torch and the contract ------------------------------------------------------


def to_torch(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{k}": torch.from_numpy(np.array(v)) for k, v in tensors.items()}


def index_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {
        name: TensorMeta(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes)
        for name, t in tensors.items()
    }


def context(config: dict[str, Any] | None, **extras: Any) -> PluginContext:
    """A context as an executor gives it to a quantizer."""
    import logging
    import time
    from pathlib import Path

    if config is not None:
        extras["quantization_config"] = config
    return PluginContext(
        logger=logging.getLogger("test"), config={}, clock=time.monotonic, data_dir=Path(),
        resolve=extras.pop("resolve", None), extras=extras,
    )  # fmt: skip


def build(
    declaration: type[Any], config: dict[str, Any] | None, need: str = "none", **options: Any
) -> Any:
    """A quantizer from its declaration, options checked as the registry does."""
    plugin = declaration()
    given = plugin.options(**options) if hasattr(plugin, "options") else None
    return plugin.build(QuantNeed(methods=need), context(config), given)


def record(
    quantizer: Any,
    tensors: dict[str, torch.Tensor],
    name: str,
    n: int,
    k: int,
    layer: str = "linear",
    bias: bool = False,
) -> Any:
    """The record of a layer, read through `slots` as the weight reader does."""
    desc, index = LinearDesc(name, layer, n, k, bias), index_of(tensors)
    slots = quantizer.slots(desc, index)
    return quantizer.record(desc, {s: tensors[s] for s in slots}, index, torch.float32)


def random_groups(
    seed: int, n: int, k: int, bits: int, group: int, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zeros and scales [N, G] with every code word present and one zero scale."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group)
    codes = rng.integers(0, 1 << bits, (n, k))
    zero = rng.integers(0, 1 << bits, (n, groups))
    scale = rng.uniform(0.001, 0.1, (n, groups)).astype(dtype)
    codes[0, : min(k, 1 << bits)] = np.arange(min(k, 1 << bits))
    zero[0, :] = 0
    zero[-1, :] = (1 << bits) - 1
    scale[1, 0] = 0
    return codes, zero, scale
