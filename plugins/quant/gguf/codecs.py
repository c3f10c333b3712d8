"""What the bytes of each GGUF block type mean: exact decoders in plain torch.

Every decoder takes uint8 [n, block bytes] and gives float32 [n, block elements]; it runs on any
device, has no host sync and rounds exactly as the format's reference does (float32, one
operation after the other).

| type | elements | bytes | value |
|---|---|---|---|
| q4_0 | 32 | 18 | (q - 8) d |
| q4_1 | 32 | 20 | q d + m |
| q5_0 | 32 | 22 | (q - 16) d |
| q5_1 | 32 | 24 | q d + m |
| q8_0 | 32 | 34 | q d |
| q2_k | 256 | 84 | d S q - dmin M, 16 sub-blocks of 16 |
| q3_k | 256 | 110 | d (S - 32) (q - 4 unless the high bit is set) |
| q4_k | 256 | 144 | d S q - dmin M, 8 sub-blocks of 32 |
| q5_k | 256 | 176 | d S q - dmin M, 8 sub-blocks of 32 |
| q6_k | 256 | 210 | d S (q - 32), 16 sub-blocks of 16 |
| iq4_nl | 32 | 18 | d table[q] |
| iq4_xs | 256 | 136 | d (S - 32) table[q], 8 sub-blocks of 32 |
| mxfp4 | 32 | 17 | 2^(e - 127) e2m1[q] |

Source: the GGUF format description; checked bit by bit against the PyPI package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the e2m1 values, so that they are integers; the scale is halved instead.
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def _table(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant on a device, made once: a copy from the host in a step would synchronise."""
    return torch.tensor(values, dtype=dtype, device=device)


_PAIRS, _BITS = (0, 2, 4, 6), tuple(range(8))
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a slice as wider numbers: copied where the slice is not laid out for that."""
    if not part.is_contiguous() or part.storage_offset() % dtype.itemsize:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return _as(blocks[:, at : at + 2], torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """uint8 [n, b], b a multiple of 8 -> [n, 2 b]: all low nibbles, then all high ones.

    Eight bytes at a time: a third of the time of byte operations on a CPU.
    """
    words = _as(qs, torch.int64)
    pair = torch.cat((words & _LOW_NIBBLES, (words >> 4) & _LOW_NIBBLES), dim=1)
    return pair.view(torch.uint8)


def _fifth_bits(qh: Tensor) -> Tensor:
    """uint8 [n, 4] (32 bits, least first) -> uint8 [n, 32] of 0 or 16."""
    shifts = _table(_BITS, torch.uint8, qh.device)
    bits = (qh.unsqueeze(-1) >> shifts) & 1
    return bits.view(qh.shape[0], 32) << 4


def _q4_0(b: Tensor) -> Tensor:
    return _nibbles(b[:, 2:18]).float().sub_(8).mul_(_half(b, 0))


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[:, 4:20]).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 6:22]) | _fifth_bits(b[:, 2:6])
    return q.float().sub_(16).mul_(_half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 8:24]) | _fifth_bits(b[:, 4:8])
    return q.float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:34].contiguous().view(torch.int8).float().mul_(_half(b, 0))


def _two_bits(qs: Tensor) -> Tensor:
    """uint8 [n, 64] -> [n, 256]: half h, shift 2 t, byte l gives element 128 h + 32 t + l."""
    shifts = _table(_PAIRS, torch.uint8, qs.device).view(1, 1, 4, 1)
    return ((qs.view(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    """q float [n, 256] times scale [n, s], one scale for each 256/s elements."""
    n, s = scale.shape
    return (q.view(n, s, -1) * scale.unsqueeze(-1)).view(n, -1)


def _q2_k(b: Tensor) -> Tensor:
    scales, q = b[:, :16], _two_bits(b[:, 16:80].contiguous()).float()
    d, dmin = _half(b, 80), _half(b, 82)
    low, high = d * (scales & 15).float(), dmin * (scales >> 4).float()
    return _scaled(q, low) - high.repeat_interleave(16, dim=1)


def _q3_k(b: Tensor) -> Tensor:
    hmask, q = b[:, :32], _two_bits(b[:, 32:96].contiguous())
    packed, d = b[:, 96:108], _half(b, 108)
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
    shifts = _table(_PAIRS, torch.uint8, b.device).view(1, 4, 1)
    top = ((packed[:, 8:12].unsqueeze(1) >> shifts) & 3).reshape(-1, 16)
    scale = (low | (top << 4)).float() - 32
    bit = _table(_BITS, torch.uint8, b.device).view(1, 8, 1)
    high = ((hmask.unsqueeze(1) >> bit) & 1).reshape(-1, 256)
    return _scaled(q.float() - 4 * (1 - high.float()), d * scale)


def _six_bits(sc: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> scales and mins, each float32 [n, 8]."""
    a, b, c = sc[:, 0:4], sc[:, 4:8], sc[:, 8:12]
    scales = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), dim=1)
    mins = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), dim=1)
    return scales.float(), mins.float()


def _chunk_nibbles(qs: Tensor) -> Tensor:
    """uint8 [n, 128] -> [n, 256]: each 32 bytes give 32 low nibbles, then 32 high ones."""
    return _nibbles(qs.reshape(-1, 32)).view(-1, 256)


def _q4_k(b: Tensor) -> Tensor:
    scales, mins = _six_bits(b[:, 4:16])
    q = _chunk_nibbles(b[:, 16:144]).float()
    high = _half(b, 2) * mins
    return _scaled(q, _half(b, 0) * scales) - high.repeat_interleave(32, dim=1)


def _q5_k(b: Tensor) -> Tensor:
    scales, mins = _six_bits(b[:, 4:16])
    bit = _table(_BITS, torch.uint8, b.device).view(1, 8, 1)
    fifth = ((b[:, 16:48].unsqueeze(1) >> bit) & 1).reshape(-1, 256)
    q = (_chunk_nibbles(b[:, 48:176]) | (fifth << 4)).float()
    high = _half(b, 2) * mins
    return _scaled(q, _half(b, 0) * scales) - high.repeat_interleave(32, dim=1)


def _q6_k(b: Tensor) -> Tensor:
    ql = b[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((ql & 15, ql >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = _table(_PAIRS, torch.uint8, b.device).view(1, 1, 4, 1)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).view(-1, 256).float() - 32
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(q, _half(b, 208) * scales)


def _iq4_nl(b: Tensor) -> Tensor:
    table = _table(_IQ4_TABLE, torch.float32, b.device)
    return _half(b, 0) * table[_nibbles(b[:, 2:18]).long()]


def _iq4_xs(b: Tensor) -> Tensor:
    shifts = _table(_PAIRS, torch.uint8, b.device)
    top = ((b[:, 2:4].unsqueeze(-1) >> shifts) & 3).reshape(-1, 8)
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=2).reshape(-1, 8)
    scale = (low | (top << 4)).float() - 32
    qs = b[:, 8:136].reshape(-1, 8, 16)
    codes = torch.cat((qs & 15, qs >> 4), dim=2).view(-1, 256).long()
    table = _table(_IQ4_TABLE, torch.float32, b.device)
    return _scaled(table[codes], _half(b, 0) * scale)


def _mxfp4(b: Tensor) -> Tensor:
    exponent = b[:, :1].to(torch.int32)
    # 2^(e - 128) in float32: below e = 2 the value is subnormal and its bits are written out.
    normal = (exponent - 1) << 23
    tiny = _table((0x00200000, 0x00400000), torch.int32, b.device)
    bits = torch.where(exponent < 2, tiny[exponent.clamp(max=1).long()], normal)
    scale = bits.view(torch.float32)
    table = _table(_E2M1_TWICE, torch.float32, b.device)
    return scale * table[_nibbles(b[:, 1:17]).long()]


@dataclass(frozen=True, slots=True)
class Codec:
    """`elems` consecutive elements of a row lie in `nbytes` bytes; `decode` gives float32."""

    elems: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]


CODECS: dict[str, Codec] = {
    "gguf:q4_0": Codec(32, 18, _q4_0),
    "gguf:q4_1": Codec(32, 20, _q4_1),
    "gguf:q5_0": Codec(32, 22, _q5_0),
    "gguf:q5_1": Codec(32, 24, _q5_1),
    "gguf:q8_0": Codec(32, 34, _q8_0),
    "gguf:q2_k": Codec(256, 84, _q2_k),
    "gguf:q3_k": Codec(256, 110, _q3_k),
    "gguf:q4_k": Codec(256, 144, _q4_k),
    "gguf:q5_k": Codec(256, 176, _q5_k),
    "gguf:q6_k": Codec(256, 210, _q6_k),
    "gguf:iq4_nl": Codec(32, 18, _iq4_nl),
    "gguf:iq4_xs": Codec(256, 136, _iq4_xs),
    "gguf:mxfp4": Codec(32, 17, _mxfp4),
}


def decode_packed(encoding: str, packed: Tensor) -> Tensor:
    """Decode whole rows.

    Args:
        encoding: a key of `CODECS`.
        packed: uint8 [..., row bytes], any device.

    Returns:
        float32 [..., K] on the same device.
    """
    codec = CODECS[encoding]
    blocks = packed.reshape(-1, codec.nbytes)
    return codec.decode(blocks).view(*packed.shape[:-1], -1)
