"""A growing arena of variable-length lists: who owns which words of one device buffer.

Requests' lists of token ids (allowed, biased, stop, bad words) lie in it, one extent a request.
Host bookkeeping only: the buffer itself belongs to `BatchState`.
"""

from __future__ import annotations

from bisect import insort


class Arena:
    """First fit over free extents, which merge with their neighbours when freed.

    `size` grows by doubling and never shrinks; the owner of the buffer follows it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), by offset

    def allocate(self, num: int) -> int:
        """The offset of `num` free words."""
        for index, (offset, length) in enumerate(self._free):
            if length >= num:
                rest = [(offset + num, length - num)] if length > num else []
                self._free[index : index + 1] = rest
                return offset
        old, grown = self.size, self.size
        while grown - old < num:
            grown *= 2
        self.size = grown
        self.free(old, grown - old)
        return self.allocate(num)

    def free(self, offset: int, num: int) -> None:
        """Give back what `allocate` returned."""
        if num == 0:
            return
        insort(self._free, (offset, num))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)
