"""Keys of the prefix cache: incremental, unambiguous, isolated."""

from __future__ import annotations

from hashlib import sha256
from itertools import product
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from cardcage.core.prefix_keys import extend_keys, root_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 6), st.lists(st.integers(0, 40), max_size=5))
def test_incremental_equals_batch(tokens: list[int], unit: int, stops: list[int]) -> None:
    root = root_key(b"model", b"")
    whole: list[bytes] = []
    extend_keys(whole, root, tokens, len(tokens), unit)
    assert len(whole) == len(tokens) // unit
    parts: list[bytes] = []
    for stop in sorted(min(s, len(tokens)) for s in stops):
        extend_keys(parts, root, tokens[:stop], stop, unit)
    extend_keys(parts, root, tokens, len(tokens), unit)
    assert parts == whole


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_equal_keys_mean_equal_prefixes(one: list[int], two: list[int], unit: int) -> None:
    root = root_key(b"model", b"")
    keys: list[list[bytes]] = [[], []]
    for found, tokens in zip(keys, (one, two)):
        extend_keys(found, root, tokens, len(tokens), unit)
    for index, (a, b) in enumerate(zip(*keys)):
        same = one[: (index + 1) * unit] == two[: (index + 1) * unit]
        assert (a == b) is same


def test_roots_never_collide() -> None:
    parts = [b"", b"a", b"b", b"ab", b"\x00", b"a\x00", b"\x02", b"a" * 300]
    roots = {root_key(seed, owner) for seed, owner in product(parts, parts)}
    assert len(roots) == len(parts) ** 2


def test_encoding_is_written_down() -> None:
    """Keys go to disk and to other processes: the encoding must not change unnoticed."""
    keys: list[bytes] = []
    extend_keys(keys, root_key(b"m", b"tt"), [1, 2, 3, 2**31 - 1], 4, 2)
    seed, owner = b"\x02" + pack("<I", 1) + b"m", b"\x03" + pack("<I", 2) + b"tt"
    parent = sha256(b"\x01" + seed + owner).digest()
    for pair, key in (((1, 2), keys[0]), ((3, 2**31 - 1), keys[1])):
        body = b"\x05" + pack("<I", 32) + parent + b"\x06" + pack("<I", 8) + pack("<II", *pair)
        parent = sha256(b"\x04" + body).digest()
        assert key == parent
