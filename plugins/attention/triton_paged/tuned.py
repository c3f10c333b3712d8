"""Launch shapes as data, per architecture and bytes of a key row.

`key bytes` = padded head size * element size (256 for head size 128 in 16 bit). A row for an
architecture that is not listed is taken from the nearest older one. The numbers come from
`python benchmarks/attention.py --tune`, which prints rows to paste here; each block says where it
was measured, or that it was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """block_m packed rows (query tokens * group) by block_n keys; tma: copy-engine tile loads
    for tiles inside one cache block (where block_n divides the block size and blocks lie whole
    rows apart; plain loads elsewhere)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_n keys a tile; the batch is cut in at most R + num_sms * waves / K items of at least
    min_tiles tiles."""

    block_n: int
    num_warps: int
    num_stages: int
    waves: int
    min_tiles: int


# Largest shared memory of one program, bytes (CUDA programming guide, table of capabilities).
SHARED_BYTES: dict[tuple[int, int], int] = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}

# Chosen by hand from register and shared memory sizes. Measured: (9, 0) 256 only, on an H200,
# 2026-12-01, 8,192 tokens: 391-399 TFLOP/s with blocks of 16, 390-437 with blocks of 64
# (benchmarks/results). Not tuned there yet.
PREFILL: dict[tuple[int, int], dict[int, PrefillConfig]] = {
    (8, 0): {
        128: PrefillConfig(128, 64, 4, 3),
        256: PrefillConfig(128, 64, 8, 3),
        512: PrefillConfig(64, 64, 8, 2),
    },
    (9, 0): {
        128: PrefillConfig(128, 128, 8, 3),
        256: PrefillConfig(128, 64, 8, 3),
        512: PrefillConfig(128, 64, 8, 2),
    },
}

# Chosen by hand from register and shared memory sizes. Measured: (9, 0) 256 only, on an H200,
# 2026-12-01, batch 64 at 8,192: 3.8-3.9 TB/s with blocks of 16, 3.9-4.1 with blocks of 64
# (benchmarks/results). Not tuned there yet.
DECODE: dict[tuple[int, int], dict[int, DecodeConfig]] = {
    (8, 0): {
        128: DecodeConfig(64, 4, 3, 8, 4),
        256: DecodeConfig(64, 4, 3, 8, 4),
        512: DecodeConfig(32, 4, 3, 8, 8),
    },
    (9, 0): {
        128: DecodeConfig(128, 4, 3, 8, 2),
        256: DecodeConfig(64, 4, 4, 8, 4),
        512: DecodeConfig(32, 4, 4, 8, 8),
    },
}

# float32 has no matrix units in full precision: small tiles keep the unrolled products short.
PREFILL_FLOAT32 = PrefillConfig(16, 16, 4, 2)
DECODE_FLOAT32 = DecodeConfig(16, 4, 2, 8, 16)


def _row(table: Mapping[tuple[int, int], Mapping[int, T]], arch: tuple[int, ...], size: int) -> T:
    wanted = tuple(arch[:2]) or (8, 0)
    known = [a for a in sorted(table) if a <= wanted] or [min(table)]
    rows = table[known[-1]]
    return rows[min((b for b in rows if b >= size), default=max(rows))]


def _shared(arch: tuple[int, ...]) -> int:
    return next((b for a, b in SHARED_BYTES.items() if a == arch[:2]), min(SHARED_BYTES.values()))


def prefill_config(arch: tuple[int, ...], dim: int, value_dim: int, size: int) -> PrefillConfig:
    """The row for this chip, made smaller where its shared memory asks for it.

    `dim` and `value_dim` are the padded head sizes, `size` the bytes of an element.
    """
    rows = dim * size, value_dim * size
    config = PREFILL_FLOAT32 if size == 4 else _row(PREFILL, arch, max(rows))
    while config.block_m * rows[0] + config.num_stages * config.block_n * sum(rows) > _shared(arch):
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_m > 64:
            config = replace(config, block_m=config.block_m // 2, num_warps=4)
        else:
            config = replace(config, block_n=config.block_n // 2)
    return config


def decode_config(arch: tuple[int, ...], dim: int, value_dim: int, size: int) -> DecodeConfig:
    """As `prefill_config`, for decode."""
    rows = dim * size, value_dim * size
    config = DECODE_FLOAT32 if size == 4 else _row(DECODE, arch, max(rows))
    while config.num_stages * config.block_n * sum(rows) > _shared(arch):
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            config = replace(config, block_n=config.block_n // 2)
    return config
