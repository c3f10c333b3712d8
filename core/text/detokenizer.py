"""Token ids to text, one token at a time, and the search for stop strings in that text.

A `Vocabulary` wraps a tokenizer once; each sample of a request gets a `Detokenizer`. Text comes
from the bytes of the generated tokens alone, so no part of the prompt can leak into it. Work
per token depends on that token's length, never on how much was generated before.

Source: Unicode 15, table 3-7 (well-formed UTF-8); Knuth, Morris, Pratt 1977 for the matcher.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cardcage.core.contracts import Tokenizer
from cardcage.core.types import TokenLogprob

_utf8 = codecs.getincrementaldecoder("utf-8")
_PROBE_IDS = 4096  # ids looked at to learn the tokenizer's leading-space rule


class Vocabulary:
    """A tokenizer's tokens as bytes, remembered, and its rule about a leading space.

    Tokenizers of the SentencePiece family drop one space at the start of a text. They are
    recognised by decoding one token that starts with a space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.special_ids = tokenizer.special_ids
        self._bytes: dict[int, bytes] = {}
        self._strips: bool | None = None

    def bytes_of(self, token_id: int) -> bytes:
        """The raw bytes of a token; b"" for an id that the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            try:
                found = self.tokenizer.token_bytes(token_id)
            except (KeyError, IndexError):  # padded rows of the embedding have no token
                found = b""
            self._bytes[token_id] = found
        return found

    def text_of(self, token_id: int) -> str:
        """A token as text; bytes that are no character on their own become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    @property
    def strips_leading_space(self) -> bool:
        """True when decoding drops one space at the start of a text."""
        if self._strips is None:
            self._strips = self._probe()
        return self._strips

    def _probe(self) -> bool:
        for token_id in range(min(self.size, _PROBE_IDS)):
            data = self.bytes_of(token_id)
            if token_id in self.special_ids or len(data) < 2 or data[:1] != b" ":
                continue
            if data[1:].isascii() and data[1:].isalpha():
                return not self.tokenizer.decode([token_id]).startswith(" ")
        return False


def utf8_tail(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character without finishing it."""
    decoder = _utf8("replace")
    decoder.decode(data[-4:])
    return decoder.getstate()[0]


def _failure(word: str) -> list[int]:
    """KMP table: for each length, the longest proper border of that prefix."""
    table = [0] * (len(word) + 1)
    k = 0
    for i in range(1, len(word)):
        while k and word[i] != word[k]:
            k = table[k]
        if word[i] == word[k]:
            k += 1
        table[i + 1] = k
    return table


class StopMatcher:
    """Finds the stop string that ends first in a growing text; ties go to the list's order.

    After `feed` without a match, `held` is the length of the longest end of the text that is a
    proper prefix of a stop string: what must not be shown yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._tables = [_failure(s) for s in self.stops]
        self._states = [0] * len(self.stops)
        self.held = 0

    def feed(self, text: str) -> tuple[int, str] | None:
        """Returns (end of the match in `text`, stop string), or None. Stops at the first."""
        states, tables, stops = self._states, self._tables, self.stops
        for position, char in enumerate(text):
            hit: str | None = None
            for i, stop in enumerate(stops):
                k = states[i]
                while k and stop[k] != char:
                    k = tables[i][k]
                if stop[k] == char:
                    k += 1
                if k == len(stop):
                    hit = hit or stop
                    k = tables[i][k]
                states[i] = k
            if hit is not None:
                return position + 1, hit
        self.held = max(states, default=0)
        return None


@dataclass(slots=True)
class _Withheld:
    """A token whose text is not released yet. `end` is unknown while a character is split."""

    token_id: int
    logprob: TokenLogprob | None
    end: int


class Detokenizer:
    """The text of one sample as it grows.

    `push` takes tokens in order and says whether a stop string ended the sample; `take` hands
    out what may be shown. The text handed out in total equals decoding all ids at once and
    cutting at the stop string that ends first.

    Args:
        vocabulary: the tokenizer's tokens.
        prompt_ids: the prompt; only its end matters (a split character, leading-space rule).
        stops: stop strings; they are searched for once `min_tokens` tokens exist.
        include_stop: keep the stop string (and text of a stop token) in the text.
        skip_special: leave special tokens out of the text.
        space_special: when False, a special token right after another loses leading spaces.
        preserve: special ids that stay in the text whatever `skip_special` says.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        space_special: bool = True,
        preserve: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._special = vocabulary.special_ids
        self._hidden = self._special - preserve if skip_special else frozenset()
        self._space_special = space_special
        self._after_special = False
        self._decoder = _utf8("replace")
        self._split = False  # the decoder holds the start of a character
        self._parts: list[str] = []  # decoded, not handed out
        self._total = 0  # characters decoded
        self._released = 0  # characters that may be handed out
        self._queue: deque[_Withheld] = deque()
        self._taken = 0  # where the text of the last token handed out ends
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._tail = self._prompt_tail(prompt_ids)
        self._strip = self._starts_text(prompt_ids)

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        data = b""
        for token_id in reversed(prompt_ids[-8:]):
            data = self._vocabulary.bytes_of(token_id) + data
            if len(data) >= 4:
                break
        return utf8_tail(data)

    def _starts_text(self, prompt_ids: Sequence[int]) -> bool:
        """True when the first visible token is the first of the whole text, and is stripped."""
        if not self._vocabulary.strips_leading_space:
            return False
        return all(token_id in self._hidden for token_id in prompt_ids)

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self.stop_reason is not None

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Add a generated token. Returns True when its text completes a stop string."""
        self.num_tokens += 1
        text = "" if token_id in self._hidden else self._decode(token_id)
        return self._append(token_id, logprob, text)

    def push_silent(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Add the token that ended the sample: it counts, and has no text."""
        self.num_tokens += 1
        self._queue.append(_Withheld(token_id, logprob, -1 if self._split else self._total))

    def _decode(self, token_id: int) -> str:
        data = self._vocabulary.bytes_of(token_id)
        if self._tail:
            data = self._complete_prompt(data)
        special = token_id in self._special
        if special and self._after_special and not self._space_special:
            data = data.lstrip(b" ")
        self._after_special = special
        if self._strip and data:
            self._strip = False
            data = data[1:] if data[:1] == b" " else data
        text = self._decoder.decode(data)
        if data:
            self._split = bool(self._decoder.getstate()[0])
        return text

    def _complete_prompt(self, data: bytes) -> bytes:
        """Drop the bytes that only finish the character which the prompt's end had split."""
        for i in range(len(data)):
            grown = self._tail + data[i : i + 1]
            decoder = _utf8("replace")
            text = decoder.decode(grown)
            rest = decoder.getstate()[0]
            if rest == grown:
                self._tail = grown
                continue
            self._tail = b""
            complete = not rest and len(text) == 1 and text != "\ufffd"
            return data[i + 1 :] if complete else data[i:]
        return b""

    def _append(self, token_id: int | None, logprob: TokenLogprob | None, text: str) -> bool:
        """Search `text`, keep it, and move the line up to which text may be shown."""
        hit = None
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            hit = self._matcher.feed(text)
        if hit is not None:
            end, stop = hit
            self.stop_reason = stop
            keep = self._total + (end if self._include_stop else end - len(stop))
            self._parts.append(text)
            cut = self._total + len(text) - keep
            if cut:
                self._parts = ["".join(self._parts)[:-cut]]
            self._total = self._released = keep
            self._split = False
            self._decoder.reset()
        else:
            if text:
                self._parts.append(text)
            self._total += len(text)
            held = 0
            if self._matcher is not None and not self._include_stop:
                held = self._matcher.held
            self._released = self._total - held
        if not self._split:
            for token in reversed(self._queue):
                if 0 <= token.end <= self._total:
                    break
                token.end = self._total
        if token_id is not None:
            self._queue.append(_Withheld(token_id, logprob, -1 if self._split else self._total))
        return hit is not None

    def finish(self) -> bool:
        """No more tokens come: flush half a character as U+FFFD and release everything.

        Returns True when the flushed character completed a stop string.
        """
        hit = False
        if self.stop_reason is None:
            rest = self._decoder.decode(b"", True)
            self._split = False
            hit = self._append(None, None, rest)
            self._released = self._total
        return hit

    def take(self) -> tuple[str, list[int], list[TokenLogprob], list[int]]:
        """Text that may be shown now; ids, logprobs and start offsets of the tokens it completes.

        A token is handed out with the text that shows all of it; none is lost or repeated.
        """
        text = "".join(self._parts)
        self._parts.clear()
        kept = self._total - self._released
        if kept:
            self._parts.append(text[-kept:])
            text = text[:-kept]
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        offsets: list[int] = []
        queue = self._queue
        while queue and 0 <= queue[0].end <= self._released:
            token = queue.popleft()
            ids.append(token.token_id)
            offsets.append(self._taken)
            self._taken = token.end
            if token.logprob is not None:
                logprobs.append(token.logprob)
        return text, ids, logprobs, offsets
