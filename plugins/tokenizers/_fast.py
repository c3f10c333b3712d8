"""What the tokenizers plugins share: a thread-safe wrapper over one `tokenizers.Tokenizer`.

Plugins differ in how they find the pieces (a tokenizer.json, GGUF metadata); from there on text
and ids go through here. Holds no per-request state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers

from cardcage.core.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# `encode` of the library keeps the interpreter lock; its batch call releases it. Below this many
# characters the batch call's own cost is larger than the pause.
_LONG_CHARS = 2048


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE vocabularies write for each byte: character -> byte.

    Printable bytes stand for themselves, the other 68 for the characters from U+0100 on.

    Source: the GPT-2 vocabulary.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = (b for b in range(256) if b not in set(plain))
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    return table


_ALPHABET = byte_level_alphabet()


@dataclass(slots=True)
class Facts:
    """What a plugin knows besides the library's own object.

    `scheme` says how vocabulary strings spell bytes: "byte_level" (each character a byte),
    "byte_fallback" (text with U+2581 for a space, `<0xNN>` for bytes) or "plain" (text).
    `literal_ids` are tokens spelled as plain text whatever the scheme (added tokens).
    `prefix_ids` and `suffix_ids` are put around a text encoded with special tokens; None leaves
    that to the library's post-processor.
    """

    scheme: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_ids: frozenset[int] = frozenset()
    literal_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] | None = None
    suffix_ids: tuple[int, ...] = ()


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


class FastTokenizer:
    """Implements the `Tokenizer` contract over the tokenizers library.

    Args:
        inner: the library's object; not changed after construction.
        facts: see `Facts`.
    """

    def __init__(self, inner: tokenizers.Tokenizer, facts: Facts) -> None:
        self._inner = inner
        self._facts = facts
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = facts.bos_token_id
        self.eos_token_ids = facts.eos_token_ids
        self.chat_template = facts.chat_template
        self.special_ids = facts.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such.

        Raises:
            InvalidRequest: the text holds a lone surrogate, so it is no Unicode text.
        """
        by_library = self._facts.prefix_ids is None
        try:
            if len(text) > _LONG_CHARS:
                encoding = self._inner.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens and by_library
                )[0]
            else:
                encoding = self._inner.encode(
                    text, add_special_tokens=add_special_tokens and by_library
                )
        except (UnicodeEncodeError, TypeError):  # which of them depends on the library's path
            _refuse_surrogates(text)
            raise
        ids: list[int] = encoding.ids
        if add_special_tokens and not by_library:
            return [*(self._facts.prefix_ids or ()), *ids, *self._facts.suffix_ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a sequence of ids; ids outside the vocabulary contribute nothing."""
        kept = list(ids)
        if len(kept) > _LONG_CHARS:
            batch = self._inner.decode_batch([kept], skip_special_tokens=skip_special_tokens)
            return str(batch[0])
        return str(self._inner.decode(kept, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for an id outside the vocabulary."""
        piece = self._inner.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._facts.literal_ids or self._facts.scheme == "plain":
            return piece.encode()
        if self._facts.scheme == "byte_level":
            try:
                return bytes(_ALPHABET[c] for c in piece)
            except KeyError:  # a piece that was never byte-level spelled: its own text
                return piece.encode()
        match = _BYTE_TOKEN.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def token_str(self, token_id: int) -> str:
        """The vocabulary's own spelling; "" for an id outside the vocabulary."""
        return self._inner.id_to_token(token_id) or ""

    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token, ... as text."""
        return self._facts.special_tokens
