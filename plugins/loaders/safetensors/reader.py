"""One safetensors file: its header, checked, over a memory map. No torch.

Layout: u64 header length, JSON {name: {dtype, shape, data_offsets: [begin, end]}} with an
optional "__metadata__", then the data that the offsets count from.

Source: the safetensors format description.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardcage.core.errors import CheckpointError

# name in the file -> (torch's name, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
# The format's own limit for the JSON part.
MAX_HEADER_BYTES = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. `start` is a file offset; `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """An open file. Invariant: every tensor's bytes lie inside it and no two overlap.

    Raises:
        CheckpointError: truncated, corrupt, or with a dtype that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private copy-on-write: writable for torch, and never reaches the file.
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise CheckpointError(f"{path.name}: the file is empty") from error
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error.strerror or error})"
            ) from error
        try:
            self.data_start = 8 + self._header_bytes()
            self.tensors = self._table(self._json())
        except BaseException:
            self.map.close()
            raise

    def digest(self) -> bytes:
        """SHA-256 over size, header and samples of the data."""
        size = len(self.map)
        digest = hashlib.sha256(struct.pack("<Q", size))
        digest.update(self.map[: self.data_start])
        room = max(size - self.data_start - _SAMPLE_BYTES, 0)
        for i in range(_SAMPLES):
            start = self.data_start + room * i // _SAMPLES
            digest.update(self.map[start : start + _SAMPLE_BYTES])
        return digest.digest()

    def _fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name}: {what}; the file is truncated or corrupt, fetch it again"
        )

    def _header_bytes(self) -> int:
        if len(self.map) < 8:
            raise self._fail(f"has {len(self.map)} bytes, too few for a header")
        (length,) = struct.unpack_from("<Q", self.map, 0)
        if length > MAX_HEADER_BYTES or length > len(self.map) - 8:
            raise self._fail(f"claims a header of {length} bytes in a file of {len(self.map)}")
        return int(length)

    def _json(self) -> dict[str, Any]:
        try:
            header = json.loads(self.map[8 : self.data_start], object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"its header is no JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._fail("its header is no JSON object")
        return header

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            raise self._fail(f"{twice!r} occurs twice in its header")
        return found

    def _table(self, header: dict[str, Any]) -> dict[str, StoredTensor]:
        room = len(self.map) - self.data_start
        tensors: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = self._tensor(name, entry, room)
        end, last = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda t: (t[1].start, t[1].nbytes)):
            if tensor.nbytes and tensor.start < end:
                raise self._fail(f"tensors {last!r} and {name!r} overlap")
            if tensor.nbytes:
                end, last = tensor.start + tensor.nbytes, name
        return tensors

    def _tensor(self, name: str, entry: Any, room: int) -> StoredTensor:
        if not isinstance(entry, dict):
            raise self._fail(f"the header entry of {name!r} is no object")
        kind, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
        if not isinstance(kind, str) or kind not in DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {name!r} has dtype {str(kind)[:40]!r}, which is not "
                f"supported; known: {', '.join(DTYPES)}"
            )
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            raise self._fail(f"tensor {name!r} has a malformed shape or offsets")
        dtype, size = DTYPES[kind]
        nbytes = size
        for dim in shape:
            nbytes *= dim
        begin, end = offsets
        if end - begin != nbytes:
            raise self._fail(
                f"tensor {name!r} ({kind} {shape}) needs {nbytes} bytes, its offsets give "
                f"{end - begin}"
            )
        if end > room:
            raise self._fail(f"tensor {name!r} ends at data byte {end} of {room}")
        return StoredTensor(dtype, tuple(shape), self.data_start + begin, nbytes)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
