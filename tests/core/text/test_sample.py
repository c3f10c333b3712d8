"""One sample between engine and reader: stop rules inside multi-token steps, counts, deltas."""

from __future__ import annotations

from typing import Any

from cardcage.core.text.detokenizer import Detokenizer, Vocabulary
from cardcage.core.text.sample import Sample
from cardcage.core.types import FinishReason, TokenLogprob, TokenOutput
from tests.support.fake_engine import ByteTokenizer

TOKENS = ByteTokenizer()
EOS = TOKENS.eos_token_ids[0]


def sample_of(**options: Any) -> Sample:
    include = options.get("include_stop", False)
    return Sample(0, "r", Detokenizer(Vocabulary(TOKENS), **options), include_stop=include)


def output(ids: list[int], reason: FinishReason | None = None, **fields: Any) -> TokenOutput:
    logprobs = [TokenLogprob(i, -0.1, 1) for i in ids]
    return TokenOutput("r", ids, logprobs=logprobs, finish_reason=reason, **fields)


def test_a_stop_inside_an_accepted_run_wins_over_length() -> None:
    sample = sample_of(stops=["b"])
    assert not sample.feed(output(list(b"abcd"), FinishReason.LENGTH))
    delta = sample.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "b")
    assert sample.num_tokens == 2
    assert len(delta.logprobs) == 2


def test_a_stop_string_asks_for_an_abort_once() -> None:
    sample = sample_of(stops=["b"])
    assert sample.feed(output(list(b"ab")))
    assert not sample.feed(output(list(b"cd")))
    assert sample.num_tokens == 2
    delta = sample.take()
    assert delta is not None
    assert delta.text == "a"
    assert sample.take() is None


def test_the_stop_token_counts_and_is_silent_unless_included() -> None:
    for include, text in ((False, "a"), (True, "a;")):
        sample = sample_of(include_stop=include)
        sample.feed(output(list(b"a;"), FinishReason.STOP, stop_reason=59))
        delta = sample.take()
        assert delta is not None
        assert (delta.text, delta.stop_reason) == (text, 59)
        assert delta.token_ids == list(b"a;")
        assert sample.num_tokens == 2


def test_the_end_of_sequence_never_shows() -> None:
    sample = sample_of(skip_special=False)
    sample.feed(output([97, EOS], FinishReason.STOP))
    delta = sample.take()
    assert delta is not None
    assert delta.text == "a"
    assert len(delta.logprobs) == len(delta.token_ids) == 2


def test_half_a_character_before_the_end_loses_no_token() -> None:
    sample = sample_of()
    sample.feed(output([97, 0xF0, 0x9F]))
    first = sample.take()
    sample.feed(output([EOS], FinishReason.STOP))
    last = sample.take()
    assert first is not None
    assert last is not None
    assert (first.text, first.token_ids) == ("a", [97])
    assert (last.text, last.token_ids) == ("\ufffd", [0xF0, 0x9F, EOS])
    assert last.offsets == [1, 2, 2]


def test_a_flushed_character_may_complete_a_stop() -> None:
    sample = sample_of(stops=["\ufffd"])
    sample.feed(output([97, 0xF0], FinishReason.LENGTH))
    delta = sample.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "\ufffd")


def test_ids_alone() -> None:
    sample = Sample(0, "r", None)
    sample.feed(output([1, 2], FinishReason.LENGTH))
    delta = sample.take()
    assert delta is not None
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("", [1, 2], 2)


def test_an_abort_from_the_engine_releases_what_was_held() -> None:
    sample = sample_of(stops=["bc"])
    sample.feed(output(list(b"ab")))
    sample.feed(output([], FinishReason.ABORT))
    delta = sample.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("ab", "abort")
