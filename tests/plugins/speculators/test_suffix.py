"""Suffix decoding against counting in all texts, with the same score."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from cardcage.core.contracts import DraftAsk
from cardcage.plugins.speculators.suffix import SuffixOptions
from cardcage.plugins.speculators.suffix.decoding import PlaceIndex, SuffixDecoding, Text


def followers(texts: list[list[int]], path: list[int]) -> Counter[int]:
    """What follows each occurrence of a path that something follows."""
    size = len(path)
    return Counter(
        text[end]
        for text in texts
        for end in range(size, len(text))
        if text[end - size : end] == path
    )


def brute(
    texts: list[list[int]], pattern: list[int], depth: int, most: int, factor: float, least: float
) -> tuple[float, list[int]]:
    best: tuple[float, list[int]] = (0.0, [])
    for size in range(1, min(depth, len(pattern)) + 1):
        path, chance, score, drafts = pattern[-size:], 1.0, 0.0, []
        for _ in range(min(most, int(size * factor + 1e-6))):
            counts = followers(texts, path)
            if not counts:
                break
            token, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
            chance *= count / sum(counts.values())
            if chance < least:
                break
            score += chance
            drafts.append(token)
            path = [*path, token]
        if drafts and score >= best[0]:
            best = (score, drafts)
    return best


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_equals_brute_force(factor: float, least: float) -> None:
    rng = Random(int(factor * 10 + least * 100))
    for _ in range(40):
        depth, index = rng.choice([2, 4, 8]), PlaceIndex(8, 10**6)
        index.depth = depth
        texts = [Text() for _ in range(3)]
        for _ in range(6):
            for text in texts:
                index.append(text, [rng.randrange(3) for _ in range(rng.randint(0, 6))])
            pattern = texts[0].tokens[-depth:]
            lists = [text.tokens for text in texts]
            score, drafts = index.speculate(pattern, 4, factor, least)
            want = brute(lists, pattern, depth, 4, factor, least)
            assert drafts == want[1]
            assert score == pytest.approx(want[0])


def test_forgotten_texts_do_not_count() -> None:
    index, texts = PlaceIndex(4, 100), [Text() for _ in range(5)]
    for number, text in enumerate(texts):
        index.append(text, [1, 2, number])
    for number in range(4):
        index.remove(texts[number])
        assert index.speculate([1, 2], 1, 1.0, 0.0)[1] == [min(number + 1, 4)]
    assert index.total - index.dead == 2
    assert sum(map(len, index.places.values())) == index.total


def test_only_the_newest_places_are_looked_at() -> None:
    index, text = PlaceIndex(4, 3), Text()
    index.append(text, [1, 9] * 50 + [1, 8] * 3 + [1])
    assert index.speculate([1], 1, 1.0, 0.0)[1] == [8]


class Session:
    def __init__(self, **options: object) -> None:
        self.card = SuffixDecoding(SuffixOptions(**options))  # type: ignore[arg-type]

    def serve(self, slot: int, prompt: list[int], output: list[int]) -> None:
        tokens = list(prompt)
        self.card.on_admit(slot, tokens, len(tokens))
        for token in output:
            tokens.append(token)
            self.card.propose([DraftAsk(slot, tokens, 4)])
        self.card.on_release(slot, tokens)

    def ask(self, tokens: list[int], most: int = 4) -> list[int]:
        self.card.on_admit(7, tokens, len(tokens))
        (found,) = self.card.propose([DraftAsk(7, tokens, most)])
        self.card.on_release(7, tokens)
        return found


def test_past_answers_help_and_prompts_do_not() -> None:
    session = Session()
    session.serve(0, [50, 51, 52, 53], [1, 2, 3, 4, 5])
    assert session.ask([9, 1, 2, 3]) == [4, 5]
    assert session.ask([9, 50, 51, 52]) == []  # what others were asked is nobody's answer


def test_answers_of_running_requests_help_each_other() -> None:
    card = SuffixDecoding(SuffixOptions())
    first, second = [40, 1, 2, 3, 4], [41, 1, 2]
    card.on_admit(0, first, 1)
    first_len = len(first)
    first += [5, 6, 7]
    card.on_admit(1, second, 1)
    second += [5, 6]
    found = card.propose([DraftAsk(0, first, 4), DraftAsk(1, second, 4)])
    assert found[1] == [7]
    assert first_len == 5


def test_the_oldest_answers_are_forgotten() -> None:
    session = Session(max_cached_requests=2)
    for number in range(3):
        base = 10 * (number + 1)
        session.serve(0, [99], [base, base + 1, base + 2])
    assert session.ask([10, 11], 1) == []
    assert session.ask([98, 30, 31], 1) == [32]
    off = Session(max_cached_requests=0)
    off.serve(0, [99], [1, 2, 3])
    assert off.ask([1, 2]) == []
    assert not off.card.answers.places


def test_a_resumed_request_is_not_counted_twice() -> None:
    session = Session()
    tokens = [99, 1, 2, 3]
    session.card.on_admit(0, tokens, 1)  # resumed: its outputs were learned before
    session.card.propose([DraftAsk(0, tokens, 4)])
    tokens.append(4)
    session.card.on_release(0, tokens)
    assert session.card.answers.total == 0  # one token, nothing follows it
