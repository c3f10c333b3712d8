"""The block pool: one uint8 buffer that every cache layer of the model views with strides.

Block b of group g is the bytes [b * page_bytes_g, (b + 1) * page_bytes_g). Which ids are handed
out, so that groups of different page sizes never overlap, is the scheduler's business. Id 0 of
every group is the null block: zeroed once, never handed out, never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cardcage.core.contracts import KVKind, KVPart
from cardcage.core.errors import ResourceError
from cardcage.core.types import KVGroupSpec

_ALIGN = 64
_GIB = 1 << 30


class KVPool:
    """The buffer and its views. New blocks are not zeroed: kernels mask by position.

    Args:
        groups: page size and block size per group; page sizes are multiples of 64 bytes.
        num_bytes: size of the buffer; rounded down to whole 64-byte units.
    """

    def __init__(self, groups: Sequence[KVGroupSpec], num_bytes: int, device: torch.device) -> None:
        self.groups = tuple(groups)
        self.num_bytes = num_bytes // _ALIGN * _ALIGN
        # Not zeroed as a whole: on a host that would touch every page of it at start-up.
        self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        reserved = max((g.page_bytes for g in self.groups), default=0)
        self.buffer[:reserved].zero_()

    def num_blocks(self, group: int) -> int:
        """Ids of a group, the null block included."""
        return self.num_bytes // self.groups[group].page_bytes

    def view(self, group: int, part: KVPart, offset: int) -> torch.Tensor:
        """One part of one layer over all blocks: [N, *part.shape], strided in dimension 0.

        Args:
            offset: bytes from the start of a page to the part.
        """
        dtype: torch.dtype = getattr(torch, part.dtype)
        size = dtype.itemsize
        page = self.groups[group].page_bytes
        strides = [1]
        for length in reversed(part.shape[1:]):
            strides.insert(0, strides[0] * length)
        if page % size or offset % size:
            raise ValueError(f"KV part {part.name} at byte {offset} is not aligned to {dtype}")
        typed = self.buffer.view(dtype)
        shape = (self.num_blocks(group), *part.shape)
        return torch.as_strided(typed, shape, (page // size, *strides), offset // size)

    def pages(self, group: int) -> torch.Tensor:
        """The pool as whole pages of a group: uint8 [N, page_bytes]."""
        page = self.groups[group].page_bytes
        num = self.num_blocks(group)
        return self.buffer[: num * page].view(num, page)

    def zero(self, group: int, blocks: torch.Tensor) -> None:
        """Zero blocks (int64 [n] on the device) of kinds that read before they write."""
        self.pages(group).index_fill_(0, blocks, 0)

    def copy(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks (int64 [n] on the device); all reads come before all writes."""
        pages = self.pages(group)
        pages.index_copy_(0, target, pages.index_select(0, source))


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The chosen size and context. `note` says why, when the context had to be cut."""

    num_bytes: int
    max_model_len: int
    note: str = ""


def request_bytes(
    num_tokens: int, in_flight: int, groups: Sequence[KVGroupSpec], kinds: Sequence[KVKind]
) -> int:
    """Bytes that one request needs to reach `num_tokens`, the null blocks included.

    Groups of several page sizes share frames of the largest page (see the scheduler's size
    classes), so each rounds up to whole frames.
    """
    largest = max((g.page_bytes for g in groups), default=0)
    total = largest
    for group, kind in zip(groups, kinds, strict=True):
        blocks = kind.max_live_blocks(num_tokens, in_flight)
        per_frame = largest // group.page_bytes
        total += -(-blocks // per_frame) * largest
    return total


def fit(
    num_bytes: int,
    wanted_len: int,
    asked_by_user: bool,
    need: Callable[[int], int],
    where: str,
) -> PoolSize:
    """Check that one request of the longest context fits the pool, or cut the context.

    Args:
        num_bytes: bytes for the pool.
        wanted_len: the context to offer, in tokens.
        asked_by_user: the user set max_model_len, so it may not be cut.
        need: bytes that one request of so many tokens needs.
        where: how the size came about, for the message.

    Raises:
        ResourceError: It does not fit and may not be cut, or nothing fits.
    """
    if need(wanted_len) <= num_bytes:
        return PoolSize(num_bytes, wanted_len)
    low, high = 0, wanted_len
    while low < high:
        middle = (low + high + 1) // 2
        if need(middle) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    have, short = num_bytes / _GIB, need(wanted_len) / _GIB
    if asked_by_user or low < 1:
        hint = f"max_model_len = {low} would fit" if low else "not even one token would fit"
        raise ResourceError(
            f"one request of {wanted_len} tokens needs {short:.3f} GiB of KV cache, but there is "
            f"{have:.3f} GiB ({where}); {hint}, or raise kv.bytes or kv.utilization"
        )
    note = (
        f"max_model_len was cut from the model's {wanted_len} to {low}: a longer request needs "
        f"{short:.3f} GiB of KV cache and there is {have:.3f} GiB ({where})"
    )
    return PoolSize(num_bytes, low, note)
