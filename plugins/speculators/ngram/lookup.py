"""An index of the token runs of each request, so that a look-up does not depend on its length.

For every run of `shortest` to `longest` tokens the index holds where its first occurrence ends.
A run is entered when a token follows it, so the run at the very end is never its own match.

Source: spec/speculation.md 3.1; the method is prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cardcage.core.contracts import DraftAsk


@dataclass(slots=True)
class RunIndex:
    """`ends[run]`: tokens up to and including its first occurrence. `known`: tokens entered."""

    known: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramLookup:
    """The speculator. Args: the shortest and the longest run of tokens to look for."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self._slots: dict[int, RunIndex] = {}

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        """Nothing is indexed before the first question: most requests may never be asked of."""
        self._slots[slot] = RunIndex()

    def on_release(self, slot: int, token_ids: Sequence[int]) -> None:
        del self._slots[slot]

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """The tokens that followed; the longest run decides, then its earliest occurrence."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: DraftAsk) -> list[int]:
        index, tokens = self._slots[ask.slot], ask.token_ids
        self._extend(index, tokens)
        total = len(tokens)
        last = tuple(tokens[-self.longest :])
        for size in range(min(self.longest, total), self.shortest - 1, -1):
            end = index.ends.get(last[-size:])
            if end is not None:
                return list(tokens[end : end + ask.max_drafts])
        return []

    def _extend(self, index: RunIndex, tokens: Sequence[int]) -> None:
        """Enter the runs that end before the last token."""
        ends = index.ends
        for end in range(index.known + 1, len(tokens)):
            window = tuple(tokens[max(0, end - self.longest) : end])
            for size in range(self.shortest, len(window) + 1):
                ends.setdefault(window[-size:], end)
        index.known = max(index.known, len(tokens) - 1)
