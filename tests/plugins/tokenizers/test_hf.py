"""Tokenizers from folders, each compared with what transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from cardcage.core.contracts import Tokenizer
from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.plugins.tokenizers.hf import HfTokenizer

TEXTS = ("", " ", "hello world", "Hello, wörld! 你好 🎉\n\n  x", "<s>hi</s> there <extra>",
         "a\u0301", "tabs\tand 12345")  # fmt: skip


def build(folder: Path) -> Tokenizer:
    ctx = SimpleNamespace(extras={"source": {"use": "hf", "path": str(folder)}})
    return HfTokenizer().build(None, ctx, None)  # type: ignore[arg-type]


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<pad>"])
    inner.add_tokens([AddedToken("<extra>", normalized=False)])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"helowrd", "he", "ll",
              "hell", "hello", "\u2581hello"]  # fmt: skip
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def with_template(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bos = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return inner


def save(folder: Path, inner: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}))
    return folder


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True},
                                   {"add_bos_token": False}])  # fmt: skip
def test_equals_transformers(
    tmp_path: Path, make: Any, template: bool, flags: dict[str, bool]
) -> None:
    transformers = pytest.importorskip("transformers")
    inner = with_template(make()) if template else make()
    folder = save(tmp_path / "m", inner, **flags)
    ours = build(folder)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert ours.vocab_size == len(oracle)
    assert ours.bos_token_id == oracle.bos_token_id
    assert ours.eos_token_ids == (oracle.eos_token_id,)
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == oracle.encode(text, add_special_tokens=special), text
            for skip in (False, True):
                got = ours.decode(ids, skip_special_tokens=skip)
                want = oracle.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert got == want


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_token_bytes_add_up(tmp_path: Path, make: Any) -> None:
    tokenizer = build(save(tmp_path / "m", make()))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        raw = b"".join(map(tokenizer.token_bytes, ids)).decode()
        # a scored vocabulary writes a space in front of each stretch of plain text
        assert raw.replace(" ", "") == text.replace(" ", "")
        if make is byte_level:
            assert raw == text
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_word_pieces_are_plain_text(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hi": 1, "<s>": 2}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = build(save(tmp_path / "m", inner))
    assert tokenizer.encode("hi there", add_special_tokens=False) == [1, 0]
    assert tokenizer.token_bytes(1) == b"hi"


def test_special_tokens_and_ids(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "m",
        byte_level(),
        pad_token={"content": "<pad>", "special": True},
        unk_token=None,
        eos_token={"__type": "AddedToken", "content": "</s>"},
    )
    tokenizer = build(folder)
    assert tokenizer.special_tokens() == {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"
    }  # fmt: skip
    ids = {t: tokenizer.encode(t, False)[0] for t in ("<s>", "</s>", "<pad>", "<extra>")}
    assert tokenizer.special_ids == {ids["<s>"], ids["</s>"], ids["<pad>"]}
    assert tokenizer.token_bytes(ids["<extra>"]) == b"<extra>"


def test_end_ids_come_from_all_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", byte_level())
    own = build(folder).eos_token_ids
    assert len(own) == 1
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert build(folder).eos_token_ids == (*own, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own[0], 9]}))
    assert build(folder).eos_token_ids == (*own, 7, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert build(folder).eos_token_ids == (*own, 5)


def test_chat_template_sources(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", byte_level())
    assert build(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    assert build(folder).chat_template == "old"
    save(folder, byte_level(), chat_template="config")
    assert build(folder).chat_template == "config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    save(folder, byte_level(), chat_template=named)
    assert build(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file é")
    assert build(folder).chat_template == "file é"


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=8, pad_id=0)
    tokenizer = build(save(tmp_path / "m", inner))
    assert len(tokenizer.encode("xyz" * 10)) == 30
    assert len(tokenizer.encode("xyz")) == 3


def test_a_special_token_outside_the_vocabulary_has_no_id(tmp_path: Path) -> None:
    tokenizer = build(save(tmp_path / "m", byte_level(), eos_token="<nope>"))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.special_tokens()["eos_token"] == "<nope>"


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.model.*transformers"):
        build(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        build(tmp_path)
    folder = save(tmp_path / "m", byte_level())
    for name in ("tokenizer_config.json", "generation_config.json"):
        path = folder / name
        before = path.read_text() if path.exists() else None
        for text in ("[1]", "{", "\xff"):
            path.write_text(text, encoding="latin-1")
            with pytest.raises(CheckpointError, match=name):
                build(folder)
        path.unlink() if before is None else path.write_text(before)
