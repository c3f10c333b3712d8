"""Models of the Hugging Face hub: `org/name`, `org/name@revision`, `org/name:file.gguf`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cardcage.core.contracts import Loader, LoaderCaps, LoaderNeed, PluginContext, RefMatch

# hf:org/name@revision:file.gguf, of which everything but org/name may be missing
REF = re.compile(
    r"(?:hf:)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+\.gguf))?"
)


class Hub:
    """Fetches a repository through huggingface_hub and its cache."""

    name = "hub"
    api = "loaders>=1.0,<2"
    caps = LoaderCaps(priority=30)

    def recognise(self, ref: str) -> RefMatch | None:
        """`org/name` in its forms, unless a local path has that name."""
        if REF.fullmatch(ref) is None:
            return None
        if ref.startswith("hf:"):
            return RefMatch(100, "starts with hf:")
        if Path(ref).exists():
            return None
        if ref.endswith(".gguf") and ":" not in ref:
            return None
        return RefMatch(40, "has the form org/name")

    def build(self, need: LoaderNeed, ctx: PluginContext, options: Any) -> Loader:
        from cardcage.plugins.loaders.hub.source import HubLoader

        return HubLoader()
