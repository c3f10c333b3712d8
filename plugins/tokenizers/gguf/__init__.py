"""Tokenizers built from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import PluginContext, Tokenizer, TokenizerCaps, TokenizerNeed


class GgufTokenizerOptions(BaseModel):
    """For files that do not say how text is split before the merges."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    pre: str | None = Field(None, description="pre-tokenizer to use instead of the file's own")


class GgufTokenizer:
    """Byte-level BPE ("gpt2") and scored BPE with byte fallback ("llama")."""

    name = "gguf"
    api = "tokenizers>=1.0,<2"
    caps = TokenizerCaps(source=frozenset({"gguf"}), priority=50)
    options = GgufTokenizerOptions

    def build(self, need: TokenizerNeed, ctx: PluginContext, options: Any) -> Tokenizer:
        """`ctx.extras["source"]` is `ModelSource.tokenizer`: {"use": "gguf", "metadata": ...}."""
        from cardcage.plugins.tokenizers.gguf.build import build_tokenizer

        source = ctx.extras["source"]
        return build_tokenizer(source["metadata"], options.pre if options else None)
