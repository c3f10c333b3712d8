"""Keys of the prefix cache: a chain of hashes over the tokens of a request.

A key stands for a whole prefix and for everything that decides its KV: model revision, KV format,
adapter and tenant are in the root. The encoding is unambiguous: every field has a tag and a length.

Source: spec/scheduler.md 4.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import pack

# One byte per field of a hashed record: no two records of different meaning are equal.
_ROOT, _SEED, _OWNER, _BLOCK, _PARENT, _TOKENS = (bytes([tag]) for tag in range(1, 7))


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + pack("<I", len(data)) + data


def root_key(root_seed: bytes, request_key: bytes) -> bytes:
    """The parent of a prefix's first block: model revision and KV format, then the tenant's key."""
    return sha256(_ROOT + _field(_SEED, root_seed) + _field(_OWNER, request_key)).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], num_tokens: int, unit: int
) -> None:
    """Append the keys of the full units of `tokens[:num_tokens]` that `keys` lacks, in place.

    Key i covers tokens [0, (i + 1) * unit): SHA-256 over its parent and its own tokens as
    little-endian u32, each with a tag and a u32 length. Nothing is hashed twice.
    """
    done, total = len(keys), num_tokens // unit
    if done >= total:
        return
    packed = array("I", tokens[done * unit : total * unit])
    if sys.byteorder == "big":
        packed.byteswap()
    raw, size = packed.tobytes(), 4 * unit
    head = _BLOCK + _PARENT + pack("<I", 32)
    middle = _TOKENS + pack("<I", size)
    parent = keys[-1] if keys else root
    for at in range(0, len(raw), size):
        parent = sha256(head + parent + middle + raw[at : at + size]).digest()
        keys.append(parent)
