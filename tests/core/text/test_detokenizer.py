"""The detokenizer against decoding everything at once, whatever the step sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardcage.core.text.detokenizer import Detokenizer, StopMatcher, Vocabulary, utf8_tail
from tests.support.fake_engine import ByteTokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_token_ids[0]


class SpmTokenizer(ByteTokenizer):
    """Drops one space at the start of a text, as SentencePiece decoders do."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = super().decode(ids, skip_special_tokens)
        return text.removeprefix(" ")


class RandomTokenizer(ByteTokenizer):
    """Every byte, and random longer byte strings that split characters anywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        alphabet = "aé€😀 bENDstop\n日".encode()
        extra = [
            alphabet[(i := rng.randrange(len(alphabet))) : i + rng.randrange(1, 6)]
            for _ in range(200)
        ]
        self._tokens = self._tokens[:256] + extra + [b"<|im_end|>"]
        self._first_special = len(self._tokens) - 1
        self.special_ids = frozenset({self._first_special})
        self.vocab_size = len(self._tokens)


def cut(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """The definition: cut at the stop string that ends first; ties by order."""
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or at + len(stop) < best[0]):
            best = (at + len(stop), stop)
    if best is None:
        return text, None
    return text[: best[0] if include else best[0] - len(best[1])], best[1]


def run(
    tokenizer: Any, ids: Sequence[int], takes: random.Random | None = None, **options: Any
) -> tuple[list[str], list[int], Detokenizer]:
    detokenizer = Detokenizer(Vocabulary(tokenizer), **options)
    texts, released = [], []
    for token in ids:
        stopped = detokenizer.push(token)
        if takes is None or takes.random() < 0.5:
            text, done, _, _ = detokenizer.take()
            texts.append(text)
            released += done
        if stopped:
            break
    detokenizer.finish()
    text, done, _, _ = detokenizer.take()
    return [*texts, text], released + done, detokenizer


def test_one_character_over_four_steps() -> None:
    texts, released, _ = run(BYTES, list("😀".encode()))
    assert texts == ["", "", "", "😀", ""]
    assert released == list("😀".encode())


def test_invalid_lead_byte_is_shown_at_once() -> None:
    assert run(BYTES, [0xFF, ord("a")])[0] == ["\ufffd", "a", ""]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    assert run(BYTES, [ord("a"), 0xF0, 0x9F, 0x98])[0] == ["a", "", "", "", "\ufffd"]


def test_stop_that_starts_inside_an_earlier_token() -> None:
    ab, cde = BYTES.encode("ab", False) + BYTES.encode("cde", False)
    texts, released, detokenizer = run(BYTES, [ab, cde], stops=["bc"])
    assert "".join(texts) == "a"
    assert detokenizer.stop_reason == "bc"
    assert released == [ab, cde]


def test_only_a_possible_stop_is_held_back() -> None:
    texts, _, _ = run(BYTES, list(b"xENyEND"), stops=["END"])
    assert texts == ["x", "", "", "ENy", "", "", "", ""]


def test_the_stop_that_ends_first_wins() -> None:
    texts, _, detokenizer = run(BYTES, list(b"abcd"), stops=["abcd", "bc"])
    assert "".join(texts) == "a"
    assert detokenizer.stop_reason == "bc"


def test_include_stop_keeps_it_and_nothing_after() -> None:
    cde = BYTES.encode("cde", False)
    texts, _, detokenizer = run(BYTES, [*b"xb", *cde], stops=["bc"], include_stop=True)
    assert "".join(texts) == "xbc"
    assert detokenizer.stopped


def test_min_tokens_closes_the_search_window() -> None:
    texts, _, detokenizer = run(BYTES, list(b"ab.ab.ab."), stops=["b."], min_tokens=4)
    assert "".join(texts) == "ab.a"
    assert detokenizer.num_tokens == 6


def test_held_text_is_released_at_the_end() -> None:
    assert "".join(run(BYTES, list(b"xEN"), stops=["END"])[0]) == "xEN"


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [ord("a"), EOS, ord("b")]
    assert "".join(run(BYTES, ids)[0]) == "ab"
    assert "".join(run(BYTES, ids, skip_special=False)[0]) == "a<|im_end|>b"
    assert "".join(run(BYTES, ids, preserve=frozenset({EOS}))[0]) == "a<|im_end|>b"


def test_a_split_character_of_the_prompt_never_shows() -> None:
    smile = list("😀".encode())
    prompt = [*b"secret ", *smile[:2]]
    texts, released, _ = run(BYTES, [*smile[2:], *b"ok"], prompt_ids=prompt)
    assert "".join(texts) == "ok"
    assert released == [*smile[2:], *b"ok"]
    assert "".join(run(BYTES, list(b"ok"), prompt_ids=prompt)[0]) == "ok"


def test_utf8_tail() -> None:
    assert utf8_tail("é".encode()) == b""
    assert utf8_tail(b"abc\xf0\x9f\x98") == b"\xf0\x9f\x98"
    assert utf8_tail(b"\xff") == b""


def test_leading_space_depends_on_what_came_before() -> None:
    spm = SpmTokenizer()
    hello = spm.encode(" hello", False)
    assert Vocabulary(spm).strips_leading_space
    assert not Vocabulary(BYTES).strips_leading_space
    assert "".join(run(spm, hello, prompt_ids=[spm.bos_token_id])[0]) == "hello"
    assert "".join(run(spm, hello, prompt_ids=[ord("x")])[0]) == " hello"
    assert "".join(run(BYTES, hello, prompt_ids=[BYTES.bos_token_id])[0]) == " hello"


@pytest.mark.parametrize("seed", range(3))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_a_full_decode_cut_at_the_first_stop(seed: int, data: st.DataObject) -> None:
    tokenizer = RandomTokenizer(seed)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    alphabet = st.text("aé€😀 bENDstop\n日\ufffd", min_size=1, max_size=4)
    stops = data.draw(st.lists(alphabet, max_size=3))
    include = data.draw(st.booleans())
    takes = random.Random(data.draw(st.integers(0, 99)))
    texts, released, detokenizer = run(tokenizer, ids, takes, stops=stops, include_stop=include)
    want, reason = cut(tokenizer.decode(ids), stops, include)
    assert "".join(texts) == want
    assert detokenizer.stop_reason == reason
    assert released == ids[: detokenizer.num_tokens]
    # A shown prefix never has to be taken back.
    shown = ""
    for text in texts:
        shown += text
        assert want.startswith(shown)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_matcher_holds_exactly_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for i, char in enumerate(text, 1):
        if matcher.feed(char) is not None:
            assert any(text[:i].endswith(s) for s in stops)
            return
        longest = max(
            (k for s in stops for k in range(len(s)) if k and text[:i].endswith(s[:k])),
            default=0,
        )
        assert matcher.held == longest


def test_work_per_token_does_not_grow() -> None:
    """Bytes are asked for once per distinct token, and nothing decodes the whole text."""

    class Counting(ByteTokenizer):
        asked = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.asked += 1
            return super().token_bytes(token_id)

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            assert len(ids) == 1
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting()
    run(tokenizer, [ord("a")] * 5000, stops=["never"])
    assert tokenizer.asked <= 300
