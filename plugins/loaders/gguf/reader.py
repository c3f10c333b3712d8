"""The GGUF container: header, metadata and tensor table of one file, read from a memory map.

Knows bytes only: names and numbers stay as the file spells them. Every count and length is
compared with what is left of the file before anything is allocated, so a corrupt header ends
in a `CheckpointError` and never in a large allocation. No torch here.

Layout, little-endian: magic "GGUF", u32 version, u64 tensors, u64 key-values; each key-value is
a string key, a u32 type and a value; each tensor is a name, u32 dims, u64 sizes (fastest first),
u32 type, u64 offset from the data section, which starts at the next multiple of
`general.alignment`.

Source: the GGUF specification (ggml-org/ggml docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardcage.core.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 2 and 3 have the same little-endian layout
MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dims, one size, type, offset
_MIN_KV_BYTES = 8 + 1 + 4 + 1
# Far above any vocabulary (the largest known has 262,144 tokens and half a million merges), far
# below what would hurt.
MAX_ARRAY = 1 << 22
MAX_STRING_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml storage type: `elems` consecutive elements of a row take `nbytes` bytes."""

    name: str
    elems: int
    nbytes: int


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    20: BlockType("iq4_nl", 32, 18),
    23: BlockType("iq4_xs", 256, 136),
    30: BlockType("bf16", 1, 2),
    39: BlockType("mxfp4", 32, 17),
}
# Types that exist but that nothing here decodes: named in the refusal.
_OTHER_TYPES = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    21: "iq3_s", 22: "iq2_s", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m",
    34: "tq1_0", 35: "tq2_0", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as stored. `shape` is row-major (slowest first); `start` is a file offset."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elems * self.type.nbytes


class GgufFile:
    """An open GGUF file. Invariant: every tensor's bytes lie inside the file.

    Args:
        path: the file.

    Raises:
        CheckpointError: truncated, corrupt, of another version, or with an unknown tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _open_map(path)
        try:
            cursor = _Cursor(self.map, path.name)
            self.version, num_tensors, num_kv = _read_header(cursor)
            self.metadata = _read_metadata(cursor, num_kv)
            self.tensors, self.data_start = _read_tensors(cursor, num_tensors, self.metadata)
        except BaseException:
            self.map.close()
            raise

    def digest(self) -> str:
        """SHA-256 (hex) over size, header and samples of the data: cheap, tied to the content."""
        size = len(self.map)
        digest = hashlib.sha256(struct.pack("<Q", size))
        digest.update(memoryview(self.map)[: self.data_start])
        room = max(size - _SAMPLE_BYTES - self.data_start, 0)
        for i in range(_SAMPLES):
            start = self.data_start + room * i // _SAMPLES
            digest.update(self.map[start : start + _SAMPLE_BYTES])
        return digest.hexdigest()


def _open_map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private copy-on-write map counts as writable, which torch wants, and never
            # reaches the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is empty, so it is no GGUF file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror or error})") from error


class _Cursor:
    """A position in the map that refuses to read past the end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.pos = 0
        self.end = len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name}: {what} (at byte {self.pos} of {self.end}); the file is truncated or "
            "corrupt, fetch it again"
        )

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.end - self.pos:
            raise self.fail(f"{what} needs {num_bytes} bytes and {self.end - self.pos} are left")

    def number(self, fmt: str, what: str) -> Any:
        size = struct.calcsize("<" + fmt)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + fmt, self.data, self.pos)
        self.pos += size
        return value

    def string(self, what: str) -> str:
        length = self.number("Q", f"length of {what}")
        if length > MAX_STRING_BYTES:
            raise self.fail(f"{what} has {length} bytes, at most {MAX_STRING_BYTES} are allowed")
        self.need(length, what)
        raw = self.data[self.pos : self.pos + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error
        self.pos += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        # The vocabulary and its merges: about 100,000 strings, so the loop is kept bare.
        data, pos, end = self.data, self.pos, self.end
        length_at = struct.Struct("<Q").unpack_from
        raw: list[bytes] = []
        for _ in range(count):
            if pos + 8 > end:
                self.pos = pos
                self.need(8, f"a string of {what}")
            (length,) = length_at(data, pos)
            pos += 8
            if length > end - pos:
                self.pos = pos
                self.need(length, f"a string of {what}")
            raw.append(data[pos : pos + length])
            pos += length
        try:
            texts = [str(item, "utf-8") for item in raw]
        except UnicodeDecodeError as error:
            raise self.fail(f"a string of {what} is not UTF-8") from error
        self.pos = pos
        return texts


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    cursor.need(4, "the magic")
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise CheckpointError(
            f"{cursor.name}: starts with {magic!r} instead of b'GGUF', so it is no GGUF file"
        )
    cursor.pos = 4
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{cursor.name}: a big-endian GGUF file; only little-endian ones are read"
            )
        raise CheckpointError(
            f"{cursor.name}: GGUF version {version} is not read (known: 2, 3); convert the model "
            "again with a current converter"
        )
    num_tensors = cursor.number("Q", "the tensor count")
    num_kv = cursor.number("Q", "the metadata count")
    left = cursor.end - cursor.pos
    if num_tensors * _MIN_TENSOR_BYTES + num_kv * _MIN_KV_BYTES > left:
        raise cursor.fail(
            f"claims {num_tensors} tensors and {num_kv} metadata entries, more than fit"
        )
    return version, num_tensors, num_kv


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, cursor.number("I", f"type of {key}"), key, 0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], key)
    if kind == _STRING:
        return cursor.string(key)
    if kind != _ARRAY:
        raise cursor.fail(f"{key} has the unknown value type {kind}")
    if depth > 3:
        raise cursor.fail(f"{key} nests arrays more than 4 deep")
    item = cursor.number("I", f"element type of {key}")
    count = cursor.number("Q", f"length of {key}")
    if count > MAX_ARRAY:
        raise cursor.fail(f"{key} has {count} elements, at most {MAX_ARRAY} are allowed")
    if item in _SCALARS:
        fmt = _SCALARS[item]
        size = struct.calcsize("<" + fmt) * count
        cursor.need(size, key)
        values = list(struct.unpack_from(f"<{count}{fmt}", cursor.data, cursor.pos))
        cursor.pos += size
        return values
    least = 8 if item == _STRING else 12
    cursor.need(count * least, key)
    if item == _STRING:
        return cursor.strings(count, key)
    return [_read_value(cursor, item, key, depth + 1) for _ in range(count)]


def _read_tensors(
    cursor: _Cursor, count: int, metadata: dict[str, Any]
) -> tuple[dict[str, GgufTensor], int]:
    raw: list[tuple[str, tuple[int, ...], BlockType, int, int]] = []
    seen: set[str] = set()
    for _ in range(count):
        name = cursor.string("a tensor name")
        if name in seen:
            raise cursor.fail(f"tensor {name!r} occurs twice")
        seen.add(name)
        num_dims = cursor.number("I", f"dims of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dims, 1 to {MAX_DIMS} are allowed")
        dims = tuple(cursor.number("Q", f"size of {name}") for _ in range(num_dims))
        kind = _block_type(cursor, name, cursor.number("I", f"type of {name}"))
        offset = cursor.number("Q", f"offset of {name}")
        raw.append((name, dims[::-1], kind, offset, _stored_bytes(cursor, name, dims, kind)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, a power of two is allowed")
    start = -(-cursor.pos // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset, nbytes in raw:
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} starts at {offset}, no multiple of {alignment}")
        if start + offset + nbytes > cursor.end:
            raise CheckpointError(
                f"{cursor.name}: tensor {name!r} ends at byte {start + offset + nbytes} and the "
                f"file has {cursor.end}; it is truncated, fetch it again"
            )
        tensors[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
    _refuse_overlap(cursor, tensors)
    return tensors, min(start, cursor.end)


def _block_type(cursor: _Cursor, name: str, number: int) -> BlockType:
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        known = ", ".join(t.name for t in BLOCK_TYPES.values())
        label = _OTHER_TYPES.get(number, "unknown")
        raise CheckpointError(
            f"{cursor.name}: tensor {name!r} has ggml type {number} ({label}), which is not "
            f"supported; take a file with one of {known}"
        )
    return kind


def _stored_bytes(cursor: _Cursor, name: str, dims: tuple[int, ...], kind: BlockType) -> int:
    elems = 1
    for size in dims:
        elems *= size
    if elems == 0:
        raise cursor.fail(f"tensor {name!r} has the empty shape {dims[::-1]}")
    if dims[0] % kind.elems:
        raise cursor.fail(
            f"tensor {name!r} has rows of {dims[0]} elements, no multiple of the {kind.elems} "
            f"of a {kind.name} block"
        )
    return elems // kind.elems * kind.nbytes


def _refuse_overlap(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    last: GgufTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.start):
        if last is not None and tensor.start < last.start + last.nbytes:
            raise cursor.fail(f"tensors {last.name!r} and {tensor.name!r} overlap")
        last = tensor
