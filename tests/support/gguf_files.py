"""Writing small GGUF files in tests, byte by byte, so that wrong ones can be written too."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "q4_k": 12, "q6_k": 14}
BLOCKS = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q4_k": (256, 144),
          "q6_k": (256, 210)}  # fmt: skip
Tensor = tuple[str, Sequence[int], str, bytes]  # name, shape (slowest first), type, data


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type number and bytes of a metadata value: bool, u32, f32, string, or a list of one."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    kind = value(item[0])[:4]
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(item))
        + b"".join(value(i)[4:] for i in item)
    )


def packed(shape: Sequence[int], kind: str, seed: int = 0) -> bytes:
    """Random but finite contents: scales are small float16 numbers."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if kind == "f32":
        return rng.standard_normal(count).astype("<f4").tobytes()
    if kind == "f16":
        return rng.standard_normal(count).astype("<f2").tobytes()
    elems, size = BLOCKS[kind]
    blocks = rng.integers(0, 256, (count // elems, size), dtype=np.uint8)
    halves = {"q6_k": (208,), "q4_1": (0, 2), "q4_k": (0, 2)}.get(kind, (0,))
    for at in halves:
        scale = (rng.random(len(blocks)) * 0.02 + 0.001).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def tensor(name: str, shape: Sequence[int], kind: str = "f32", seed: int | None = None) -> Tensor:
    return name, shape, kind, packed(shape, kind, len(name) if seed is None else seed)


def dump(
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> bytes:
    """The bytes of a GGUF file. `counts` lies about the numbers of tensors and values."""
    num_tensors, num_kv = counts or (len(tensors), len(metadata))
    out = magic + struct.pack("<IQQ", version, num_tensors, num_kv)
    for key, item in metadata.items():
        out += text(key) + value(item)
    data = b""
    for name, shape, kind, raw in tensors:
        data += b"\0" * (-len(data) % align)
        dims = b"".join(struct.pack("<Q", d) for d in reversed(shape))
        number = TYPES[kind] if kind in TYPES else int(kind)
        out += text(name) + struct.pack("<I", len(shape)) + dims
        out += struct.pack("<IQ", number, len(data))
        data += raw
    return out + b"\0" * (-len(out) % align) + data


def write(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor], **lies: Any) -> Path:
    path.write_bytes(dump(metadata, tensors, **lies))
    return path


def llama(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a tiny model: 1 layer, hidden 32, 4 heads of 8, 2 KV heads, MLP 64."""
    base = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    own = {k.replace("__", "."): v for k, v in changes.items()}
    merged = {k: v for k, v in {**base, **own}.items() if v is not None}
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in merged.items()}}


def layer(kind: str = "q4_0") -> list[Tensor]:
    """The tensors of a llama layer of that size, with embedding and final norm."""
    return [
        tensor("token_embd.weight", (16, 32), "q8_0"),
        tensor("output_norm.weight", (32,)),
        tensor("blk.0.attn_norm.weight", (32,)),
        tensor("blk.0.ffn_norm.weight", (32,)),
        tensor("blk.0.attn_q.weight", (32, 32), kind),
        tensor("blk.0.attn_k.weight", (16, 32), kind),
        tensor("blk.0.attn_v.weight", (16, 32), kind),
        tensor("blk.0.attn_output.weight", (32, 32), kind),
        tensor("blk.0.ffn_gate.weight", (64, 32), kind),
        tensor("blk.0.ffn_up.weight", (64, 32), kind),
        tensor("blk.0.ffn_down.weight", (32, 64), kind),
    ]
