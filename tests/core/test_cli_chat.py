"""`cardcage chat` and `complete`, here and against a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from cardcage.core import cli_chat
from cardcage.core.cli_chat import LocalSpeaker, RemoteSpeaker, main_chat, main_complete
from cardcage.core.errors import ConfigError, EngineError
from cardcage.core.llm import LLM
from tests.support.fake_engine import ByteTokenizer, make_parts
from tests.support.live_server import LiveServer

TOKENS = ByteTokenizer()
EOS = TOKENS.eos_token_ids[0]


def conversation(*turns: str) -> tuple[int, ...]:
    text = "".join(
        f"<|im_start|>{('user', 'assistant')[i % 2]}\n{turn}<|im_end|>\n"
        for i, turn in enumerate(turns)
    )
    return tuple(TOKENS.encode(text + "<|im_start|>assistant\n", False))


SCRIPT = {
    conversation("hi"): [*b"Hello", EOS],
    conversation("hi", "Hello", "more"): [*b"More", EOS],
    tuple(TOKENS.encode("one")): [*b" two", EOS],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with LiveServer(script=SCRIPT) as live:
        yield live.url


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    import cardcage.core.llm as llm_module

    made = LLM.from_parts
    parts = make_parts(script=SCRIPT)
    monkeypatch.setattr(llm_module, "LLM", lambda config: made(parts))


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.parametrize("where", ["here", "server"])
def test_one_shot_and_conversation(
    where: str,
    url: str,
    local: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--url", url] if where == "server" else []
    assert main_chat([*flags, "-q", "hi", "--temperature", "0", "--stats"]) == 0
    told = capsys.readouterr()
    assert told.out == "Hello\n"
    assert "[6 tokens, first after" in told.err
    type_in(monkeypatch, "hi\n\nmore\n/reset\nhi\n/exit\nnever\n")
    assert main_chat(flags) == 0
    assert capsys.readouterr().out == "Hello\nMore\nHello\n"
    assert main_complete([*flags, "-q", "one"]) == 0
    assert capsys.readouterr().out == " two\n"
    type_in(monkeypatch, "one")
    assert main_complete(flags) == 0
    assert capsys.readouterr().out == " two\n"


def test_server_errors_are_one_sentence(url: str) -> None:
    with pytest.raises(EngineError, match="answered 404: The model `x` does not exist"):
        main_chat(["--url", url, "--model-name", "x", "-q", "hi"])
    with pytest.raises(EngineError, match=r"cannot reach http://127.0.0.1:9/v1"):
        main_chat(["--url", "http://127.0.0.1:9", "-q", "hi"])


def test_contradictions_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="leave ours out"):
        main_chat(["--url", url, "--max-num-seqs", "3", "-q", "hi"])
    with pytest.raises(ConfigError, match="--model-name is for --url"):
        main_chat(["--model-name", "x", "-q", "hi"])
    with pytest.raises(ConfigError, match="--api-key is for --url"):
        main_chat(["--api-key", "x", "-q", "hi"])
    with pytest.raises(SystemExit):  # a completion has no system prompt to put it in
        main_complete(["--system-prompt", "x", "-q", "hi"])


def test_an_interrupted_answer_keeps_what_was_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed: list[bool] = []

    def pieces() -> Iterator[cli_chat.Piece]:
        try:
            yield cli_chat.Piece("half", 1)
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert cli_chat._say(pieces(), stats=True) == "half"
    assert closed == [True]
    assert capsys.readouterr().out == "half\n"


def test_speakers_have_the_same_methods() -> None:
    for name in ("chat", "complete", "close"):
        assert callable(getattr(LocalSpeaker, name))
        assert callable(getattr(RemoteSpeaker, name))


def test_the_url_may_end_in_v1(url: str) -> None:
    speaker: Any = RemoteSpeaker(url + "/v1/", None, None, {})
    assert speaker._model == "fake"
