"""Counting continuations of suffixes over lists of token positions.

A suffix tree holds, per suffix, how often each token followed. The same numbers come from the
places where the last token occurred before: those that agree one token further left are the
occurrences of the suffix that is one longer. So an index of places by token is enough, costs one
entry per token instead of one node per suffix, and a look-up touches at most `max_occurrences`
places, the newest; up to that many the counts are exact. A frequency is a share of the places
that something follows, so the suffix at the very end of a text does not count against its match.

Source: spec/speculation.md 3.2; SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from cardcage.core.contracts import DraftAsk

if TYPE_CHECKING:
    from cardcage.plugins.speculators.suffix import SuffixOptions


@dataclass(slots=True, eq=False)
class Text:
    """Tokens of one request. `live`: still part of its index."""

    tokens: list[int] = field(default_factory=list)
    live: bool = True


Place = tuple[Text, int]  # a text, and the tokens of it up to and including an occurrence


class PlaceIndex:
    """Where each token occurs with another one after it, over any number of texts.

    Args:
        depth: longest suffix in tokens.
        most: occurrences of the last token that a look-up considers.
    """

    def __init__(self, depth: int, most: int) -> None:
        self.depth, self.most = depth, most
        self.places: dict[int, list[Place]] = {}
        self.total = self.dead = 0

    def append(self, text: Text, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        have = text.tokens
        for token in tokens:
            if have:
                self.places.setdefault(have[-1], []).append((text, len(have)))
                self.total += 1
            have.append(token)

    def remove(self, text: Text) -> None:
        """Forget a text; its entries go when they outnumber the others."""
        text.live = False
        self.dead += max(0, len(text.tokens) - 1)
        if 2 * self.dead > self.total:
            kept = {t: [p for p in found if p[0].live] for t, found in self.places.items()}
            self.places = {token: found for token, found in kept.items() if found}
            self.total, self.dead = sum(map(len, self.places.values())), 0

    def speculate(
        self, pattern: Sequence[int], most: int, factor: float, least: float
    ) -> tuple[float, list[int]]:
        """(score, tokens): the continuation of the suffix of `pattern` with the best score.

        For each length m of a suffix that occurs: follow the most frequent next token (of equals
        the smallest id) for at most floor(m * factor) tokens while the product of frequencies
        stays at least `least`; the score is the sum of the products. Equal scores: the longest.
        """
        best: tuple[float, list[int]] = (0.0, [])
        if not pattern:
            return best
        newest = (p for p in reversed(self.places.get(pattern[-1], ())) if p[0].live)
        found = list(islice(newest, self.most))
        length, deepest = 1, min(len(pattern), self.depth)
        while found:
            limit = min(most, int(length * factor + 1e-6))
            score, tokens = _walk(found, limit, least)
            if tokens and score >= best[0]:
                best = (score, tokens)
            length += 1
            if length > deepest:
                break
            wanted = pattern[-length]
            found = [
                (t, end) for t, end in found if end >= length and t.tokens[-length + end] == wanted
            ]
        return best


def _walk(places: list[Place], limit: int, least: float) -> tuple[float, list[int]]:
    chance, score = 1.0, 0.0
    tokens: list[int] = []
    while len(tokens) < limit and places:
        counts = Counter(text.tokens[end] for text, end in places)
        token, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        chance *= count / len(places)
        if chance < least:
            break
        tokens.append(token)
        score += chance
        # What ends with the path so far says nothing about what follows it.
        places = [
            (text, end + 1)
            for text, end in places
            if text.tokens[end] == token and end + 1 < len(text.tokens)
        ]
    return score, tokens


@dataclass(slots=True)
class _Slot:
    own: PlaceIndex
    text: Text
    answer: Text
    answered: int  # tokens before the first one of `answer`


class SuffixDecoding:
    """The speculator: one index per request, one of all answers."""

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self.answers = PlaceIndex(options.max_tree_depth, options.max_occurrences)
        self._past: deque[Text] = deque()
        self._slots: dict[int, _Slot] = {}

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        """Outputs that a resumed request brings are remembered already."""
        own = PlaceIndex(self.options.max_tree_depth, self.options.max_occurrences)
        self._slots[slot] = _Slot(own, Text(), Text(), max(prompt_len, len(token_ids)))

    def on_release(self, slot: int, token_ids: Sequence[int]) -> None:
        """The answer joins the past ones; the oldest are forgotten."""
        entry = self._slots.pop(slot)
        self._learn(entry, token_ids)
        if not entry.answer.tokens:
            return
        self._past.append(entry.answer)
        while len(self._past) > self.options.max_cached_requests:
            self.answers.remove(self._past.popleft())

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """The better of the request's own continuation and that of all answers."""
        entries = [self._slots[ask.slot] for ask in asks]
        for entry, ask in zip(entries, asks):
            entry.own.append(entry.text, ask.token_ids[len(entry.text.tokens) :])
            self._learn(entry, ask.token_ids)
        return [self._propose(entry, ask) for entry, ask in zip(entries, asks)]

    def _learn(self, entry: _Slot, token_ids: Sequence[int]) -> None:
        if self.options.max_cached_requests:
            have = entry.answered + len(entry.answer.tokens)
            self.answers.append(entry.answer, token_ids[have:])

    def _propose(self, entry: _Slot, ask: DraftAsk) -> list[int]:
        options = self.options
        pattern = ask.token_ids[-options.max_tree_depth :]
        numbers = (ask.max_drafts, options.max_spec_factor, options.min_token_prob)
        own = entry.own.speculate(pattern, *numbers)
        past = self.answers.speculate(pattern, *numbers)
        return (past if past[0] > own[0] else own)[1]
