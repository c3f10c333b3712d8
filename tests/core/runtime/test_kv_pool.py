"""Pool views, null block, zeroing and copying, and the sizing rules."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.contracts import KVPart
from cardcage.core.errors import ResourceError
from cardcage.core.runtime.kv_pool import KVPool, fit, request_bytes
from cardcage.core.types import KVGroupSpec

CPU = torch.device("cpu")
BIG = KVGroupSpec("big", "full", 4, 512)
SMALL = KVGroupSpec("small", "window", 4, 128, {"window": 8})


class FixedKind:
    """A cache kind for sizing: every token needs its block, a window at most `most` blocks."""

    def __init__(self, size: int, most: int = 1 << 30) -> None:
        self.size, self.most = size, most

    def max_live_blocks(self, num_tokens: int, in_flight: int) -> int:
        return min(-(-num_tokens // self.size), self.most)


def test_block_id_is_a_byte_offset() -> None:
    pool = KVPool((BIG, SMALL), 8 * 512, CPU)
    pool.buffer.zero_()
    part = KVPart("k", (2, 4, 8), "float32")
    view = pool.view(0, part, 256)
    assert view.shape == (8, 2, 4, 8)
    view[3] = torch.arange(64.0).view(2, 4, 8)
    start = 3 * 512 + 256
    assert torch.equal(pool.buffer[start : start + 256].view(torch.float32), torch.arange(64.0))
    assert int(pool.buffer[:start].sum()) == 0
    assert pool.num_blocks(1) == 32
    small = pool.view(1, KVPart("v", (16,), "bfloat16"), 64)
    small[5] = 1.0
    assert torch.equal(pool.pages(1)[5, 64:96].view(torch.bfloat16), torch.ones(16).bfloat16())


def test_parts_of_one_page_do_not_overlap() -> None:
    pool = KVPool((BIG,), 4 * 512, CPU)
    pool.buffer.zero_()
    first = pool.view(0, KVPart("k", (4, 16), "float32"), 0)
    second = pool.view(0, KVPart("v", (4, 16), "float32"), 256)
    first.fill_(1.0)
    assert float(second.sum()) == 0.0
    second.fill_(2.0)
    assert torch.all(first == 1.0)


def test_null_block_is_zero_and_size_is_rounded() -> None:
    pool = KVPool((BIG, SMALL), 2 * 512 + 63, CPU)
    assert pool.num_bytes == 2 * 512
    assert int(pool.buffer[:512].sum()) == 0


def test_misaligned_part_is_refused() -> None:
    pool = KVPool((BIG,), 1024, CPU)
    with pytest.raises(ValueError, match="not aligned"):
        pool.view(0, KVPart("k", (4,), "float32"), 6)


def test_zero_and_copy_whole_blocks() -> None:
    pool = KVPool((BIG, SMALL), 8 * 512, CPU)
    pool.buffer.copy_(torch.arange(8 * 512) % 251)
    before = pool.pages(0).clone()
    pool.zero(0, torch.tensor([2, 5]))
    assert int(pool.pages(0)[[2, 5]].sum()) == 0
    assert torch.equal(pool.pages(0)[[1, 3, 4, 6, 7]], before[[1, 3, 4, 6, 7]])
    # A chain of copies: every source is read before any target is written.
    pool.copy(0, torch.tensor([1, 3]), torch.tensor([3, 4]))
    assert torch.equal(pool.pages(0)[3], before[1])
    assert torch.equal(pool.pages(0)[4], before[3])


def test_request_bytes_counts_null_and_whole_frames() -> None:
    assert request_bytes(10, 0, [BIG], [FixedKind(4)]) == 512 + 3 * 512
    # Four small pages share a frame of the large one; a third of a window's tokens stays live.
    kinds = [FixedKind(4), FixedKind(4, most=3)]
    assert request_bytes(40, 0, [BIG, SMALL], kinds) == 512 + 10 * 512 + 512
    assert request_bytes(10, 0, [], []) == 0


def test_fit_keeps_cuts_or_refuses() -> None:
    def need(num_tokens: int) -> int:
        return request_bytes(num_tokens, 0, [BIG], [FixedKind(4)])

    assert fit(512 * 100, 64, False, need, "why") == fit(512 * 100, 64, True, need, "why")
    cut = fit(512 * 6, 64, False, need, "kv.bytes")
    assert cut.max_model_len == 20
    assert "cut from the model's 64 to 20" in cut.note
    with pytest.raises(ResourceError, match="max_model_len = 20 would fit"):
        fit(512 * 6, 64, True, need, "kv.bytes")
    with pytest.raises(ResourceError, match="not even one token"):
        fit(512, 64, False, need, "kv.bytes")
