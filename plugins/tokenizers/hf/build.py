"""From tokenizer.json, tokenizer_config.json and chat_template.jinja to a tokenizer.

tokenizer.json is followed as it is written (its post-processor says which special tokens are
added, not `add_bos_token` of tokenizer_config.json: transformers 5 does the same), except that
truncation and padding stored in it are switched off. Spaces before punctuation are never
"cleaned up" after decoding, whatever tokenizer_config.json says: that cannot be done on a stream
and loses text.

Source: file formats as transformers writes and reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.plugins.tokenizers._fast import Facts, FastTokenizer

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def build_tokenizer(folder: Path) -> FastTokenizer:
    """A tokenizer from a model folder.

    Raises:
        UnsupportedModel: there is no tokenizer.json (only an older format, or nothing).
        CheckpointError: a file is corrupt.
    """
    inner = _library_object(folder)
    config = {
        **_json(folder / "special_tokens_map.json"),
        **_json(folder / "tokenizer_config.json"),
    }
    texts = {f"{n}_token": _text(config.get(f"{n}_token")) for n in _NAMES}
    special = {key: text for key, text in texts.items() if text is not None}
    ids = {key: inner.token_to_id(text) for key, text in special.items()}
    added = inner.get_added_tokens_decoder()
    special_ids = {i for i, token in added.items() if token.special}
    special_ids |= {i for key, i in ids.items() if i is not None and key != "unk_token"}
    return FastTokenizer(
        inner,
        Facts(
            scheme=_scheme(inner),
            bos_token_id=ids.get("bos_token"),
            eos_token_ids=_eos_ids(folder, ids.get("eos_token")),
            chat_template=_template(folder, config),
            special_ids=frozenset(special_ids),
            literal_ids=frozenset(added),
            special_tokens=special,
        ),
    )


def _library_object(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "tekken.json", "vocab.json")
                  if (folder / n).is_file()]  # fmt: skip
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json ({', '.join(others) or 'no tokenizer file'} found); "
            "load and save the tokenizer once with transformers to get one, or set "
            "skip_tokenizer_init to serve token ids alone"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise CheckpointError(f"{path} is no usable tokenizer file ({error})") from error
    inner.no_truncation()
    inner.no_padding()
    return inner


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, a JSON object is needed")
    return value


def _text(value: Any) -> str | None:
    """A special token is stored as its text or as a dictionary with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _scheme(inner: tokenizers.Tokenizer) -> str:
    """How the vocabulary spells bytes, told by the decoder (else the pre-tokenizer)."""
    for part in (inner.decoder, inner.pre_tokenizer):
        if part is None:
            continue
        state = part.__getstate__().decode()
        if '"ByteLevel"' in state:
            return "byte_level"
        if '"ByteFallback"' in state or '"Metaspace"' in state or "\u2581" in state:
            return "byte_fallback"
    return "plain"


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own id, then those of generation_config.json, else of config.json."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        config = _json(folder / name)
        value = config.get("eos_token_id")
        if value is None:
            value = (config.get("text_config") or {}).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        listed = [v for v in values if type(v) is int and v >= 0]
        if listed:
            found += listed
            break
    return tuple(dict.fromkeys(found))


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else what tokenizer_config.json holds (its "default" of several)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
    template = config.get("chat_template") or _json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
