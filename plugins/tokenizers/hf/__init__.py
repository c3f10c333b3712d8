"""Tokenizers from the files of a Hugging Face folder: tokenizer.json and its companions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cardcage.core.contracts import PluginContext, Tokenizer, TokenizerCaps, TokenizerNeed


class HfTokenizer:
    """Any tokenizer.json, through the tokenizers library."""

    name = "hf"
    api = "1.0"
    caps = TokenizerCaps(source=frozenset({"hf"}), priority=50)

    def build(self, need: TokenizerNeed, ctx: PluginContext, options: Any) -> Tokenizer:
        """`ctx.extras["source"]` is `ModelSource.tokenizer`: {"use": "hf", "path": folder}."""
        from cardcage.plugins.tokenizers.hf.build import build_tokenizer

        return build_tokenizer(Path(ctx.extras["source"]["path"]))
