"""Log-probabilities joined with the text and bytes of their tokens.

The engine reports ids and numbers; clients want strings. A token's string is its own bytes
decoded with replacement, never the vocabulary's internal spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cardcage.core.text.detokenizer import Vocabulary
from cardcage.core.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position: natural log, 1-based rank (None unknown), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def candidates(
    entry: TokenLogprob | None, vocabulary: Vocabulary | None
) -> dict[int, Logprob] | None:
    """All candidates of one position by token id: the chosen one first, then the top ones.

    None for a position that has no prediction (a prompt's first token).
    """
    if entry is None:
        return None

    def text(token_id: int) -> str | None:
        return None if vocabulary is None else vocabulary.text_of(token_id)

    out = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, value) in enumerate(entry.top, 1):
        if token_id not in out:
            out[token_id] = Logprob(value, rank, text(token_id))
    return out


def all_candidates(
    entries: Sequence[TokenLogprob | None], vocabulary: Vocabulary | None
) -> list[dict[int, Logprob] | None]:
    """`candidates` for each position."""
    return [candidates(entry, vocabulary) for entry in entries]
