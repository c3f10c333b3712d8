"""Plain Python versions of the work lists that `plan_kernel` makes, to compare it with.

Attention itself is compared with the dense float64 formula of the contract suite.
"""

from __future__ import annotations


def key_tiles(seq_len: int, q_len: int, window: int, tile: int) -> tuple[int, int]:
    """Key tiles [lo, hi) that the last q_len rows of a request can see."""
    if q_len == 0:
        return 0, 0
    hi = -(-seq_len // tile)
    if window == 0:
        return 0, hi
    return min(max(seq_len - q_len - window + 1, 0) // tile, hi), hi


def decode_items(
    query_lens: list[int],
    seq_lens: list[int],
    tile: int,
    window: int,
    target: int,
    min_tiles: int,
) -> list[list[int]]:
    """Rows [req, first, count, lo, hi, seq_len, q_start, q_len] of `plan_kernel` for decode."""
    spans = [key_tiles(s, q, window, tile) for q, s in zip(query_lens, seq_lens, strict=True)]
    total = sum(hi - lo for lo, hi in spans)
    chunk = max(min_tiles, -(-total // target))
    items: list[list[int]] = []
    q_start = 0
    for req, (q_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        lo, hi = spans[req]
        count = max(1, -(-(hi - lo) // chunk)) if q_len else 0
        first = len(items)
        for i in range(count):
            per = -(-(hi - lo) // count)
            begin = min(lo + i * per, hi)
            end = min(begin + per, hi)
            items.append([req, first, count, begin, end, seq_len, q_start, q_len])
        q_start += q_len
    return items


def prefill_items(query_lens: list[int], seq_lens: list[int], block_q: int) -> list[list[int]]:
    """Rows [req, first, count, tile, seq_len, q_start, q_len] of `plan_kernel` for prefill."""
    items: list[list[int]] = []
    q_start = 0
    for req, (q_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = -(-q_len // block_q)
        first = len(items)
        for tile in range(count):
            items.append([req, first, count, tile, seq_len, q_start, q_len])
        q_start += q_len
    return items
