"""From GGUF metadata to a tokenizer: vocabulary, merges, pre-tokenizer, special tokens.

Two vocabulary models are known. "gpt2": byte-level BPE with explicit merges, where
`tokenizer.ggml.pre` names how text is cut first (a wrong cut silently gives other ids, so an
unknown name is refused). "llama": SentencePiece BPE, whose merges follow from the scores, with
single-byte tokens for what the vocabulary lacks.

Source: the GGUF specification; pre-tokenizer names as llama.cpp's converter writes them; the
cutting rules themselves from the published tokenizer.json files of those models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.plugins.tokenizers._fast import Facts, FastTokenizer

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6

_OPEN = r"[^\r\n\p{L}\p{N}]?"
_WORDS = _OPEN + r"\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(short: str) -> str:
    """Words cut where a lower-case run ends, each with an optional English short form."""
    return f"{_OPEN}{_UPPER}*{_LOWER}+{short}|{_OPEN}{_UPPER}+{_LOWER}*{short}"


@dataclass(frozen=True, slots=True)
class Pre:
    """How text is cut before the merges.

    `pattern` "" is GPT-2's own rule, `digits` cuts every digit off first. `ignore_merges`: a
    piece that is a token as a whole is taken as such. `bos`: whether a beginning-of-sequence
    token is added when the file does not say.
    """

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_GPT2 = Pre()
_DIGITS = Pre(digits=True)
_LLAMA3 = Pre(rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}", ignore_merges=True, bos=True)
_CL100K = Pre(rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}")
_QWEN2 = Pre(rf"{_SHORT}|{_WORDS}|\p{{N}}|{_TAIL}", nfc=True)
_O200K = Pre(rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}|{_CASED_TAIL}")
_TEKKEN = Pre(rf"{_cased('')}|\p{{N}}|{_CASED_TAIL}", ignore_merges=True, bos=True)
PRE: dict[str, Pre] = {
    "codeshell": _DIGITS,
    "command-r": _DIGITS,
    "dbrx": _CL100K,
    "deepseek-r1-qwen": _QWEN2,
    "default": _GPT2,
    "exaone": _DIGITS,
    "falcon3": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt-4o": _O200K,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "minerva-7b": _DIGITS,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _TEKKEN,
}


def build_tokenizer(metadata: Mapping[str, Any], pre: str | None = None) -> FastTokenizer:
    """A tokenizer from `tokenizer.*` metadata.

    Args:
        metadata: the file's metadata (keys `tokenizer.ggml.*`, `tokenizer.chat_template`,
            `general.architecture`).
        pre: pre-tokenizer name that replaces the file's.

    Raises:
        UnsupportedModel: a vocabulary model or pre-tokenizer that is not known.
        CheckpointError: the lists are missing, of different lengths, or inconsistent.
    """
    pieces = _list(metadata, "tokens", str)
    if not pieces:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty")
    types = _list(metadata, "token_type", int) or [1] * len(pieces)
    if len(types) != len(pieces):
        raise CheckpointError(f"{len(pieces)} tokens but {len(types)} token types")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        inner, add_bos = _byte_level(metadata, pieces, pre)
        scheme = "byte_level"
    elif model == "llama":
        inner, add_bos = _scored(metadata, pieces, types)
        scheme = "byte_fallback"
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model {model!r} is not supported (known: gpt2, llama); use the "
            "safetensors checkpoint with its tokenizer.json instead"
        )
    _add_tokens(inner, metadata, pieces, types)
    return FastTokenizer(inner, _facts(metadata, pieces, types, scheme, add_bos))


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
        raise CheckpointError(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
    return value


def _vocab(pieces: Sequence[str]) -> dict[str, int]:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        seen: set[str] = set()
        twice = next(p for p in pieces if p in seen or seen.add(p))  # type: ignore[func-returns-value]
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    return vocab


def _byte_level(
    metadata: Mapping[str, Any], pieces: list[str], pre: str | None
) -> tuple[tokenizers.Tokenizer, bool]:
    name = pre or metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise UnsupportedModel(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), and a wrong one gives "
            "other token ids; convert the model again, or set option `pre` of the gguf tokenizer "
            f"to one of {', '.join(sorted(PRE))}"
        )
    rule = PRE.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known: "
            f"{', '.join(sorted(PRE))}. Use the safetensors checkpoint instead"
        )
    merges = [tuple(m.split(" ")) for m in _list(metadata, "merges", str)]
    bad = next((m for m in merges if len(m) != 2), None)
    if bad is not None:
        raise CheckpointError(f"tokenizer.ggml.merges holds {' '.join(bad)!r}, which is no pair")
    try:
        bpe = models.BPE(vocab=_vocab(pieces), merges=merges, ignore_merges=rule.ignore_merges)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception for a merge out of vocabulary
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    inner = tokenizers.Tokenizer(bpe)
    if rule.nfc:
        inner.normalizer = normalizers.NFC()
    stages: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    if rule.pattern:
        stages.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated", invert=False))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.pattern))
    inner.pre_tokenizer = pre_tokenizers.Sequence(stages) if len(stages) > 1 else stages[0]
    inner.decoder = decoders.ByteLevel()
    return inner, rule.bos


def _scored(
    metadata: Mapping[str, Any], pieces: list[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(pieces):
        raise CheckpointError(f"{len(pieces)} tokens but {len(scores)} scores")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UnsupportedModel(
            "a vocabulary that collapses whitespace (remove_extra_whitespaces) is not supported; "
            "use the safetensors checkpoint instead"
        )
    vocab = _vocab(pieces)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    has_unknown = isinstance(unknown, int) and 0 <= unknown < len(pieces)
    bpe = models.BPE(
        vocab=vocab,
        merges=merges_from_scores(vocab, scores, types),
        unk_token=pieces[unknown] if has_unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = tokenizers.Tokenizer(bpe)
    space_first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend("\u2581")] if space_first else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        back.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(back)
    return inner, True


def merges_from_scores(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, best score of the result first.

    SentencePiece merges the pair whose result scores highest, the leftmost of equals; a BPE with
    these merges in this order does the same.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, i in vocab.items():
        if types[i] in (_CONTROL, _BYTE, _UNKNOWN) or len(piece) < 2:
            continue
        pairs = [
            (vocab[piece[:cut]], vocab[piece[cut:]], cut)
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        for _, _, cut in sorted(pairs):
            found.append((scores[i], cut, len(piece) - cut, (piece[:cut], piece[cut:])))
    found.sort(key=lambda m: m[:3], reverse=True)
    return [m[3] for m in found]


def _add_tokens(
    inner: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    pieces: Sequence[str],
    types: Sequence[int],
) -> None:
    # Phi-3's own tokenizer.json strips whitespace after its control tokens; GGUF cannot say so.
    phi3 = metadata.get("general.architecture") == "phi3" and (
        metadata.get("tokenizer.ggml.model") == "llama"
    )
    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    special, literal = [], []
    for piece, kind in zip(pieces, types):
        if kind in (_CONTROL, _UNKNOWN) and piece:
            rstrip = phi3 and piece not in keeps
            special.append(AddedToken(piece, special=True, normalized=False, rstrip=rstrip))
        elif kind == _USER and piece:
            literal.append(AddedToken(piece, special=False, normalized=False))
    inner.add_special_tokens(special)
    inner.add_tokens(literal)


def _facts(
    metadata: Mapping[str, Any],
    pieces: Sequence[str],
    types: Sequence[int],
    scheme: str,
    add_bos: bool,
) -> Facts:
    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(pieces) else None

    bos, eos = token("bos"), token("eos")
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    ends = [i for i in (eos, token("eot"), token("eom")) if i is not None]
    ends += _turn_ends(pieces, types, template)
    names = {"bos_token": bos, "eos_token": eos, "unk_token": token("unknown"),
             "pad_token": token("padding"), "sep_token": token("seperator")}  # fmt: skip
    begin = metadata.get("tokenizer.ggml.add_bos_token", add_bos) and bos is not None
    end = metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    special = frozenset(i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN))
    return Facts(
        scheme=scheme,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=template,
        special_ids=special,
        literal_ids=special | {i for i, t in enumerate(types) if t == _USER},
        special_tokens={k: pieces[i] for k, i in names.items() if i is not None},
        prefix_ids=(bos,) if begin and bos is not None else (),
        suffix_ids=(eos,) if end and eos is not None else (),
    )


_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def _turn_ends(pieces: Sequence[str], types: Sequence[int], template: str | None) -> list[int]:
    """Control tokens that close a turn in the file's own chat template.

    Many files name only the end of text as eos; a chat then never ends.
    """
    if template is None:
        return []
    wanted = {t for t in _TURN_ENDS if t in template}
    return [i for i, (p, t) in enumerate(zip(pieces, types)) if t == _CONTROL and p in wanted]
