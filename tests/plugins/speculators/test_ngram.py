"""Prompt lookup against a search through all positions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from cardcage.core.contracts import DraftAsk, SpeculatorNeed
from cardcage.plugins.speculators.ngram import Ngram, NgramOptions
from cardcage.plugins.speculators.ngram.lookup import NgramLookup


def brute(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for end in range(size, len(tokens)):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + most]
    return []


def ask(card: Any, tokens: list[int], most: int) -> list[int]:
    (found,) = card.propose([DraftAsk(0, tokens, most)])
    return found


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (5, 5)])
def test_equals_brute_force(shortest: int, longest: int) -> None:
    rng = Random(shortest * 10 + longest)
    for _ in range(60):
        card = NgramLookup(shortest, longest)
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        card.on_admit(0, tokens, len(tokens))
        for _ in range(8):  # it grows by what verification gave
            most = rng.randint(1, 5)
            assert ask(card, tokens, most) == brute(tokens, shortest, longest, most)
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 4))]


def test_slots_are_apart_and_start_afresh() -> None:
    card = NgramLookup(1, 2)
    card.on_admit(0, [1, 2, 1], 3)
    card.on_admit(1, [3, 4, 3], 3)
    asks = [DraftAsk(0, [1, 2, 1], 4), DraftAsk(1, [3, 4, 3], 1)]
    assert card.propose(asks) == [[2, 1], [4]]
    card.on_release(0, [1, 2, 1])
    card.on_admit(0, [5, 1], 2)
    assert ask(card, [5, 1], 4) == []


def test_options() -> None:
    assert NgramOptions().bounds == (5, 5)
    assert NgramOptions(prompt_lookup_min=2).bounds == (2, 2)
    assert NgramOptions(prompt_lookup_max=3).bounds == (3, 3)
    assert NgramOptions(prompt_lookup_min=2, prompt_lookup_max=4).bounds == (2, 4)
    with pytest.raises(ValidationError, match="prompt_lookup_min 4 is more than"):
        NgramOptions(prompt_lookup_min=4, prompt_lookup_max=2)
    with pytest.raises(ValidationError):
        NgramOptions(min=2)
    card = Ngram().build(SpeculatorNeed(), None, NgramOptions(prompt_lookup_max=3))  # type: ignore[arg-type]
    assert (card.shortest, card.longest) == (3, 3)  # type: ignore[attr-defined]
