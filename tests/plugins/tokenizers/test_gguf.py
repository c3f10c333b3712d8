"""Tokenizers from GGUF metadata: the reference ids, byte-exact round trips, oracles, refusals."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cardcage.core.contracts import Tokenizer
from cardcage.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from cardcage.plugins.loaders.gguf.reader import GgufFile
from cardcage.plugins.tokenizers._fast import byte_level_alphabet
from cardcage.plugins.tokenizers.gguf import GgufTokenizer, GgufTokenizerOptions
from cardcage.plugins.tokenizers.gguf.build import PRE

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPELLED = {b: c for c, b in byte_level_alphabet().items()}


def build(metadata: Mapping[str, Any], **options: Any) -> Tokenizer:
    ctx = SimpleNamespace(extras={"source": {"use": "gguf", "metadata": metadata}})
    chosen = GgufTokenizerOptions(**options)
    return GgufTokenizer().build(None, ctx, chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return GgufFile(smollm2_path).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return build(smollm2_metadata)


# ---- the embedded model -------------------------------------------------------------------------


def test_reference_prompts(smollm2: Tokenizer, reference_cases: list[dict[str, Any]]) -> None:
    for case in reference_cases:
        assert smollm2.encode(case["prompt"]) == case["prompt_token_ids"], case["name"]
        got = smollm2.decode(case["output_ids"], skip_special_tokens=False)
        assert got == case["text"], case["name"]


def test_facts_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_tokens()["eos_token"] == "<|im_end|>"
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template
    assert set(range(17)) == smollm2.special_ids
    assert smollm2.token_str(7042) == "ĠParis"
    assert smollm2.token_bytes(7042) == b" Paris"
    assert smollm2.token_bytes(1) == b"<|im_start|>"
    assert smollm2.token_bytes(10**6) == b""
    assert smollm2.token_str(10**6) == ""


def test_digits_are_split_one_by_one(smollm2: Tokenizer) -> None:
    assert [smollm2.token_bytes(i) for i in smollm2.encode("Age:  42")] == [
        b"Age", b":", b"  ", b"4", b"2"
    ]  # fmt: skip


def test_special_tokens_in_text_and_when_decoding(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(smollm2_path: Path, text: str) -> None:
    tokenizer = _shared(smollm2_path)
    text = "".join(c for c in text if _LACKING.isdisjoint(c.encode()))
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# Bytes that this vocabulary has no token for: the model cannot read characters that need them.
_LACKING = frozenset((4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2))
_BUILT: dict[Path, Tokenizer] = {}


def _shared(path: Path) -> Tokenizer:
    if path not in _BUILT:
        _BUILT[path] = build(GgufFile(path).metadata)
    return _BUILT[path]


def test_bytes_without_a_token_are_left_out(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a\x04b") == smollm2.encode("a") + smollm2.encode("b")


def test_every_single_token_has_its_bytes(smollm2: Tokenizer) -> None:
    rng = random.Random(0)
    for token in rng.sample(range(17, 49152), 500):
        raw = smollm2.token_bytes(token)
        assert raw
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue  # part of a character
        assert smollm2.decode([token]) == text


def test_long_texts_take_the_batch_path_with_equal_result(smollm2: Tokenizer) -> None:
    part = "Some words, 12 numbers and an émoji 🎉.\n"
    whole = part * 100
    ids = smollm2.encode(whole)
    assert smollm2.decode(ids, skip_special_tokens=False) == whole
    assert ids == [i for _ in range(100) for i in smollm2.encode(part)]
    assert smollm2.decode(ids * 3) == whole * 3


def test_a_lone_surrogate_is_an_invalid_request(smollm2: Tokenizer) -> None:
    for text in ("a\ud800", "x" * 5000 + "\udfff"):
        with pytest.raises(InvalidRequest, match="surrogate"):
            smollm2.encode(text)


def test_loading_is_fast(smollm2_metadata: dict[str, Any]) -> None:
    start = time.process_time()
    build(smollm2_metadata)
    assert time.process_time() - start < 1.0  # about 0.1 s on an idle core


# ---- small byte-level vocabularies --------------------------------------------------------------


def byte_level(words: list[str], pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """256 bytes, then words whose merges build them from left to right, then two specials."""
    pieces = [SPELLED[b] for b in range(256)]
    merges = []
    for word in words:
        spelled = "".join(SPELLED[b] for b in word.encode())
        for cut in range(2, len(spelled) + 1):
            if spelled[:cut] not in pieces:
                merges.append(f"{spelled[: cut - 1]} {spelled[cut - 1]}")
                pieces.append(spelled[:cut])
    types = [NORMAL] * len(pieces) + [CONTROL, CONTROL, USER]
    pieces += ["<s>", "<|im_end|>", "<tool> x"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(pieces) - 3,
        "tokenizer.ggml.eos_token_id": len(pieces) - 2,
    }
    return {k: v for k, v in {**metadata, **changes}.items() if v is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]


WORDS = ["12345", " 12", "don't", "DON'T", "Hello", " world", "helloWorld", "\n\n\n", "!!\n", "  ",
         "...", "ab", " ab"]  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("gpt-2", "12345", ["12345"]),
        ("smollm", "12345", list("12345")),
        ("llama-bpe", "12345", ["123", "4", "5"]),
        ("qwen2", "12345", list("12345")),
        ("gpt-4o", "12345", ["123", "4", "5"]),
        ("tekken", "12345", list("12345")),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
        ("llama-bpe", "DON'T", ["DON", "'", "T"]),
        ("gpt-2", "helloWorld", ["helloWorld"]),
        ("gpt-4o", "helloWorld", ["hello", "W", "o", "r", "l", "d"]),
        ("gpt-2", "\n\n\nHello", ["\n\n", "\n", "Hello"]),
        ("llama-bpe", "\n\n\nHello", ["\n\n\n", "Hello"]),
        ("qwen2", "!!\nab", ["!!\n", "ab"]),
        ("gpt-2", "!!\nab", ["!!", "\n", "ab"]),
        ("smollm", "Hello world 12", ["Hello", " world", " ", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, want: list[str]) -> None:
    assert pieces(build(byte_level(WORDS, pre)), text) == want


@pytest.mark.parametrize("pre", sorted(PRE))
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    tokenizer = build(byte_level(WORDS, pre))
    rng = random.Random(pre)
    alphabet = "aB1 \n\t'sdé你🎉.,-_A\r\u00a0\u0301"
    for _ in range(40):
        text = "".join(rng.choices(alphabet, k=30))
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = b"".join(map(tokenizer.token_bytes, ids)).decode()
        if PRE[pre].nfc:
            import unicodedata

            text = unicodedata.normalize("NFC", text)
        assert back == text
        assert tokenizer.decode(ids) == text


def test_bos_and_eos_follow_the_file() -> None:
    words = ["ab"]
    last = build(byte_level(words)).vocab_size - 1

    def ids(**changes: Any) -> list[int]:
        changes = {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
        return build(
            byte_level(words, changes.pop("tokenizer.ggml.pre", "gpt-2"), **changes)
        ).encode("ab")

    assert ids() == [256]
    assert ids(add_bos_token=True) == [last - 2, 256]
    assert ids(add_bos_token=True, add_eos_token=True) == [last - 2, 256, last - 1]
    assert ids(pre="llama-bpe") == [last - 2, 256]  # the default of that family
    assert ids(pre="llama-bpe", add_bos_token=False) == [256]


def test_added_tokens() -> None:
    tokenizer = build(byte_level(["ab"]))
    last = tokenizer.vocab_size - 1
    ids = tokenizer.encode("ab<tool> x<s>")
    assert ids == [256, last, last - 2]
    assert tokenizer.decode(ids) == "ab<tool> x"  # user tokens are text, control tokens are not
    assert tokenizer.token_bytes(last) == b"<tool> x"
    assert tokenizer.special_ids == {last - 2, last - 1}


def test_turn_ends_of_the_chat_template_stop_too() -> None:
    metadata = byte_level(["ab"])
    bos = metadata["tokenizer.ggml.bos_token_id"]
    metadata["tokenizer.ggml.eos_token_id"] = bos
    assert build(metadata).eos_token_ids == (bos,)
    metadata["tokenizer.chat_template"] = "{{ x }}<|im_end|>"
    assert build(metadata).eos_token_ids == (bos, bos + 1)
    metadata["tokenizer.ggml.eot_token_id"] = 5
    assert build(metadata).eos_token_ids == (bos, 5, bos + 1)


def test_refusals() -> None:
    with pytest.raises(UnsupportedModel, match=r"'kimi-k2'.*smollm"):
        build(byte_level([], "kimi-k2"))
    unnamed = byte_level(["12345"], **{"tokenizer.ggml.pre": None})
    with pytest.raises(UnsupportedModel, match="option `pre`"):
        build(unnamed)
    assert pieces(build(unnamed, pre="smollm"), "12") == ["1", "2"]
    with pytest.raises(UnsupportedModel, match="'bert'"):
        build(byte_level([], **{"tokenizer.ggml.model": "bert"}))
    with pytest.raises(CheckpointError, match="missing or empty"):
        build(byte_level([], **{"tokenizer.ggml.tokens": None}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", ["a", "a"], "'a' twice"),
        ("tokens", [1, 2], "no list of str"),
        ("tokens", "abc", "no list of str"),
        ("token_type", [1, 1], "2 token types"),
        ("merges", ["abc"], "no pair"),
        ("merges", ["a b c"], "no pair"),
        ("merges", ["xx yy"], "do not fit"),
    ],
)
def test_broken_metadata(key: str, value: Any, message: str) -> None:
    metadata = byte_level(["ab"], **{f"tokenizer.ggml.{key}": value})
    if key == "tokens":
        metadata.pop("tokenizer.ggml.token_type")
    with pytest.raises(CheckpointError, match=message):
        build(metadata)


def test_equals_transformers_on_a_trained_vocabulary(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    corpus = [Path(__file__).read_text(), "naïve café 你好 🎉 " * 20]
    trained.train_from_iterator(
        corpus,
        tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    import json

    model = json.loads(trained.to_str())["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].get)
    ours = build(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": by_id,
            "tokenizer.ggml.token_type": [CONTROL, CONTROL] + [NORMAL] * (len(by_id) - 2),
            "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    for text in (*corpus, "<s>x</s> y", "", " ", "\n \n", "a\u0301"):
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False)
        ids = ours.encode(text)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


# ---- scored vocabularies (SentencePiece) --------------------------------------------------------

SPACE = "\u2581"


def scored(**changes: Any) -> dict[str, Any]:
    words = [SPACE + "hello", SPACE + "world", SPACE + "he", "llo", SPACE + "a", "he", "ll", "lo",
             SPACE + "w", "or", "ld", "orld", SPACE + SPACE, "ab", "abc", "bc"]  # fmt: skip
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz.,"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(words) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {k: v for k, v in {**metadata, **changes}.items() if v is not None}


def sentencepiece_reference(metadata: Mapping[str, Any], text: str) -> list[int]:
    """Merge the best scoring neighbours until none is left; bytes for what remains unknown."""
    vocab = {p: i for i, p in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    parts = list(text)
    while True:
        best: list[tuple[float, int]] = []
        for i in range(len(parts) - 1):
            token = vocab.get(parts[i] + parts[i + 1])
            if token is not None and types[token] == NORMAL:
                heapq.heappush(best, (-scores[token], i))
        if not best:
            break
        i = best[0][1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [3 + b for b in part.encode()]
    return ids


def test_scored_vocabulary_equals_the_reference_algorithm() -> None:
    metadata = scored()
    tokenizer = build(metadata)
    rng = random.Random(5)
    texts = ["hello world", "abc", "  ab", "hé 你🎉", "world.hello,", ""]
    texts += ["".join(rng.choices("heloworldab ,.é", k=25)) for _ in range(200)]
    for text in texts:
        spelled = (SPACE + text.replace(" ", SPACE)) if text else ""
        want = sentencepiece_reference(metadata, spelled)
        assert tokenizer.encode(text, add_special_tokens=False) == want, text
        assert tokenizer.encode(text) == [1, *want]
        assert tokenizer.decode(want) == text
        raw = b"".join(map(tokenizer.token_bytes, want)).decode()
        assert raw == (" " + text if text else "")


def test_byte_tokens_and_specials_of_a_scored_vocabulary() -> None:
    tokenizer = build(scored())
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<s>a", add_special_tokens=False)[0] == 1
    # a byte token written out is text, not a byte
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def test_without_a_space_in_front() -> None:
    metadata = scored(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = build(metadata)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert ids == sentencepiece_reference(metadata, "hello")
    assert tokenizer.decode(ids) == "hello"
    ids = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.decode(ids) == " hello"


def test_phi3_control_tokens_strip_what_follows() -> None:
    metadata = scored(**{"general.architecture": "phi3"})
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|end|>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0]
    end = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = build(metadata)
    stripped = tokenizer.encode("<|end|>\n", add_special_tokens=False)
    assert stripped == [end]
    metadata["general.architecture"] = "llama"
    assert len(build(metadata).encode("<|end|>\n", add_special_tokens=False)) > 1


def test_broken_scored_metadata() -> None:
    with pytest.raises(CheckpointError, match="scores"):
        build(scored(**{"tokenizer.ggml.scores": [0.0]}))
    with pytest.raises(UnsupportedModel, match="whitespace"):
        build(scored(**{"tokenizer.ggml.remove_extra_whitespaces": True}))
