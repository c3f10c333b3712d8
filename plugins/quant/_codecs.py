"""What the numbers of quantized checkpoints mean: encodings, packings, encoders, the one decoder.

Every quantizer of this folder ends in a record whose value is, in float32,

    w[n, k] = (code[n, k] - zero[n, group(k)]) * scale[n, group(k)]

and whose `encoding` says how to read it: `family:group[+zero][+gidx][/activations]`.

| family | part | shape | codes |
|---|---|---|---|
| fp8 | weight | [N, K] float8_e4m3fn | the numbers themselves |
| int8 | weight | [N, K] int8 | signed, zero 0 unless `+zero` (part `zero` int8 [N, G]) |
| int4, int3, int2 | codes | [N, 4 * ceil(K * bits / 32)] uint8 | unsigned, see below |

Codes below 8 bits are one little-endian bit stream along K per row; their zero is 2^(bits - 1)
unless `+zero` (part `zero` uint8 [N, G]).

`group` is `row` (one scale per row) or `gX` (X columns share one); part `scale` is [N, G] in
float32, float16 or bfloat16. `+gidx`: part `gidx` int32 [1, K] holds the group of each column
(act-order) instead of k // X; it is shared by all rows ([N, K] gives each row its own).
`/activations` tells the kernel what to do with x: `token`, `static`, `group`, ... (fp8_matmul and
int8_matmul list theirs); without it x stays as it is. A static scale lies in part `input_scale`
float32 [N, 1], one entry per row.

So every part but `gidx` has N rows, whatever the checkpoint's own granularity: components of a
fused layer (q, k, v) concatenate along dim 0 with exact scales and no requantization, and
act-order components stay apart. Scales per tensor or per block are repeated per row for that:
4 N bytes, or K / 32 bytes per row for blocks of 128 (3 % of the codes).

Source: quant.md 1.1, 1.5 and 2 of this project's specification.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cardcage.core.contracts import QuantTensor
from cardcage.core.errors import CheckpointError

E4M3_MAX = 448.0
_ENCODING = re.compile(r"(fp8|int8|int4|int3|int2):(row|g\d+)((?:\+zero|\+gidx)*)(?:/(\w+))?")


@dataclass(frozen=True, slots=True)
class Layout:
    """An encoding, parsed. `group` is the number of columns that share a scale, 0 for a row."""

    family: str
    group: int = 0
    zero: bool = False
    gidx: bool = False
    act: str = ""

    @property
    def name(self) -> str:
        """The encoding as records carry it."""
        flags = ("+zero" if self.zero else "") + ("+gidx" if self.gidx else "")
        act = f"/{self.act}" if self.act else ""
        return f"{self.family}:{f'g{self.group}' if self.group else 'row'}{flags}{act}"

    @property
    def bits(self) -> int:
        return 8 if self.family == "fp8" else int(self.family[3:])


@cache
def parse(encoding: str) -> Layout:
    """The layout that an encoding names. Raises ValueError for one that is not of this module."""
    match = _ENCODING.fullmatch(encoding)
    if match is None:
        raise ValueError(f"{encoding!r} is not an encoding of the checkpoint quantizers")
    family, group, flags, act = match.groups()
    size = 0 if group == "row" else int(group[1:])
    return Layout(family, size, "+zero" in flags, "+gidx" in flags, act or "")


# ---- bit streams --------------------------------------------------------------------------------


def unpack_bits(stream: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [..., B], a little-endian bit stream per row -> its first `count` values, uint8."""
    if bits == 8:
        return stream[..., :count]
    if bits == 3:  # 8 values in 3 bytes
        *lead, size = stream.shape
        triples = stream[..., : size // 3 * 3].reshape(*lead, size // 3, 3).to(torch.int32)
        word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        values = torch.stack([word >> (3 * i) & 7 for i in range(8)], dim=-1)
    else:
        mask = (1 << bits) - 1
        values = torch.stack([stream >> s & mask for s in range(0, 8, bits)], dim=-1)
    return values.flatten(-2)[..., :count].to(torch.uint8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """uint8 [N, K] of `bits` wide values -> uint8 [N, 4 * ceil(K * bits / 32)], zero padded."""
    n, k = values.shape
    size = 4 * -(-k * bits // 32)
    if bits == 8:
        return torch.nn.functional.pad(values, (0, size - k))
    per, width = (8, 3) if bits == 3 else (8 // bits, 1)
    room = -(-size // width) * per
    words = torch.nn.functional.pad(values, (0, room - k)).view(n, -1, per).to(torch.int32)
    total = torch.zeros_like(words[..., 0])
    for i in range(per):
        total |= words[..., i] << (bits * i)
    out = torch.stack([total >> (8 * b) & 255 for b in range(width)], dim=-1)
    return out.flatten(1)[:, :size].to(torch.uint8).contiguous()


def words_to_stream(words: Tensor) -> Tensor:
    """int32 [R, W] -> the same bits as uint8 [R, 4 W] (words are little-endian)."""
    # flat first: a row of one word may have any stride, which a view of bytes refuses
    return words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)


# ---- decoding -----------------------------------------------------------------------------------


def _spread(values: Tensor, layout: Layout, k: int, gidx: Tensor | None) -> Tensor:
    """Per-group values [n, G] -> [n, K], or [n, 1] where one value serves the row."""
    if gidx is not None:
        return values.gather(1, gidx.expand(values.shape[0], k).long())
    if not layout.group:
        return values
    return values.repeat_interleave(layout.group, dim=1)[:, :k]


def _values(record: QuantTensor, ids: Tensor | None) -> Tensor:
    layout, parts = parse(record.encoding), record.parts
    n, k = record.shape

    def rows(name: str) -> Tensor:
        return parts[name] if ids is None else parts[name].index_select(0, ids)

    gidx = None
    if layout.gidx:
        shared = parts["gidx"].shape[0] == 1 and n != 1
        gidx = parts["gidx"] if shared else rows("gidx")
    scale = _spread(rows("scale").float(), layout, k, gidx)
    if layout.family == "fp8":
        return rows("weight").float() * scale
    if layout.family == "int8":
        codes = rows("weight").float()
        if not layout.zero:
            return codes * scale
    else:
        codes = unpack_bits(rows("codes"), layout.bits, k).float()
        if not layout.zero:
            return (codes - float(1 << (layout.bits - 1))) * scale
    return (codes - _spread(rows("zero").float(), layout, k, gidx)) * scale


def decode(record: QuantTensor) -> Tensor:
    """The exact weight [N, K] in float32, on the parts' device."""
    return _values(record, None)


def decode_rows(record: QuantTensor, ids: Tensor) -> Tensor:
    """Rows `ids` (int64 [n]) of the weight, float32 [n, K]."""
    return _values(record, ids)


def make_record(layout: Layout, shape: tuple[int, int], parts: dict[str, Tensor]) -> QuantTensor:
    """A record of this module's encodings."""
    return QuantTensor(layout.name, shape, parts, decode, decode_rows)


# ---- records from canonical pieces --------------------------------------------------------------


def packed_record(
    name: str,
    bits: int,
    shape: tuple[int, int],
    stream: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    gidx: Tensor | None,
) -> QuantTensor:
    """A record of unsigned codes, each part checked.

    Args:
        name: the weight's name, for error messages.
        bits: 2, 3, 4 or 8; 8-bit codes become signed int8 (code - 128), the same values.
        stream: uint8 [N, >= K * bits / 8], a bit stream along K.
        scale: float [N, G]; zero: uint8 [N, G] or None for 2^(bits - 1).
        group: columns per group, 0 for the whole row.
        gidx: int [K], the group of each column, or None for k // group.

    Raises:
        CheckpointError: a shape that does not fit, a group index out of range, a bad scale.
    """
    n, k = shape
    groups = -(-k // group) if group else 1
    for what, part in (("scales", scale), ("zero points", zero)):
        if part is not None and tuple(part.shape) != (n, groups):
            raise CheckpointError(
                f"{name}: a weight [{n}, {k}] with {group or k} columns per group needs {what} "
                f"for [{n}, {groups}], the checkpoint has [{', '.join(map(str, part.shape))}]"
            )
    require_finite(f"{name} scales", scale)
    if zero is not None and bool((zero == 1 << (bits - 1)).all()):
        zero = None
    if gidx is not None:
        gidx = _checked_gidx(name, gidx, k, groups, group)
    layout = Layout(f"int{bits}", 0 if groups == 1 else group, zero is not None, gidx is not None)
    parts = {"scale": scale.contiguous()}
    if bits == 8:
        parts["weight"] = (stream[:, :k] ^ 128).contiguous().view(torch.int8)
        zero = None if zero is None else (zero ^ 128).contiguous().view(torch.int8)
    else:
        parts["codes"] = stream.contiguous()
    if zero is not None:
        parts["zero"] = zero.contiguous()
    if gidx is not None:
        parts["gidx"] = gidx
    return make_record(layout, shape, parts)


def _checked_gidx(name: str, gidx: Tensor, k: int, groups: int, group: int) -> Tensor | None:
    """int32 [1, K]; None when it says nothing but k // group."""
    if tuple(gidx.shape) != (k,):
        raise CheckpointError(f"{name}: g_idx has shape {list(gidx.shape)}, expected [{k}]")
    gidx = gidx.to(torch.int32)
    if k and (int(gidx.min()) < 0 or int(gidx.max()) >= groups):
        raise CheckpointError(
            f"{name}: g_idx holds groups {int(gidx.min())}..{int(gidx.max())}, but there are "
            f"{groups} groups (0..{groups - 1})"
        )
    plain = torch.arange(k, dtype=torch.int32) // (group or k)
    return None if groups == 1 or torch.equal(gidx, plain) else gidx.view(1, k).contiguous()


def require_finite(name: str, values: Tensor) -> None:
    """Raises CheckpointError if a scale (any float dtype) holds NaN or infinity."""
    if not bool(torch.isfinite(values.float()).all()):
        raise CheckpointError(f"{name} hold NaN or infinity: the checkpoint is damaged")


# ---- encoding -----------------------------------------------------------------------------------

ReduceMax = Callable[[Tensor], Tensor]


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 (ties to even), saturating at 448 whatever torch's cast does on overflow."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_eight_bit(
    weight: Tensor,
    family: str,
    block: tuple[int, int] | None,
    per_tensor: bool = False,
    reduce_max: ReduceMax | None = None,
    search: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize a float weight [N, K] to fp8 or int8 codes [N, K] and scales [N, G] float32.

    Args:
        weight: float32; the scale of a group is its largest magnitude / 448 (fp8) or / 127.
        block: (rows, columns) that share a scale, None for one scale per row.
        per_tensor: one scale for all (block is None then).
        reduce_max: joins the magnitudes with those of the other shards of the same weight, so
            that codes and scales equal those of the unsharded weight. Called once.
        search: fp8 with one scale per row or group: of 8 scales within an octave, take the one
            with the least squared error.

    A group of zeros gets scale 1 and codes 0.
    """
    n, k = weight.shape
    magnitude = weight.abs()
    if per_tensor:
        amax = magnitude.amax().view(1, 1)
    elif block is None:
        amax = magnitude.amax(dim=1, keepdim=True)
    else:
        rows, cols = block
        up, right = -n % rows, -k % cols
        padded = torch.nn.functional.pad(magnitude, (0, right, 0, up))
        amax = padded.view((n + up) // rows, rows, (k + right) // cols, cols).amax(dim=(1, 3))
    if reduce_max is not None:
        amax = reduce_max(amax)
    limit = E4M3_MAX if family == "fp8" else 127.0
    tiny = torch.finfo(torch.float32).tiny
    scale = torch.where(amax > 0, (amax / limit).clamp_min(tiny), 1.0)
    if search:
        scale = _least_error(weight, scale, 0 if block is None else block[1])
    if per_tensor:
        scale = scale.expand(n, 1)
    elif block is not None:
        scale = scale.repeat_interleave(block[0], dim=0)[:n]
    layout = Layout(family, 0 if block is None else block[1])
    # a true division: multiplying by a reciprocal flips codes by one
    scaled = weight / _spread(scale, layout, k, None)
    if family == "fp8":
        return to_e4m3(scaled), scale.contiguous()
    return scaled.round().clamp(-127, 127).to(torch.int8), scale.contiguous()


def _least_error(weight: Tensor, scale: Tensor, group: int) -> Tensor:
    """The best of scale * 2^(i / 8), i < 8, for each row or group of columns of e4m3 codes.

    Steps of e4m3 double with each octave, so a factor of 2 changes nothing and less than that
    decides which numbers fall on coarse steps.
    """
    n, k = weight.shape
    width = group or k
    tiles = torch.nn.functional.pad(weight, (0, -k % width)).view(n, -1, width)
    best, least = scale, torch.full_like(scale, torch.inf)
    for i in range(8):
        trial = scale * 2.0 ** (i / 8)
        wide = trial.unsqueeze(-1)
        error = (to_e4m3(tiles / wide).float() * wide - tiles).square_().sum(dim=-1)
        better = error < least
        best, least = torch.where(better, trial, best), torch.where(better, error, least)
    return best
