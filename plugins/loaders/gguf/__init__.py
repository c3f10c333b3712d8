"""Single GGUF files: own reader, Hugging Face names and config, packed tensors kept packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cardcage.core.contracts import Loader, LoaderCaps, LoaderNeed, PluginContext, RefMatch


class Gguf:
    """Reads a local `.gguf` file through a memory map."""

    name = "gguf"
    api = "loaders>=1.0,<2"
    caps = LoaderCaps(priority=50)

    def recognise(self, ref: str) -> RefMatch | None:
        """A path that ends in .gguf and is no `scheme:` or hub reference."""
        if not ref.lower().endswith(".gguf") or ref.startswith(("pypi:", "dummy:", "hf:")):
            return None
        if Path(ref).is_file():
            return RefMatch(90, "an existing .gguf file")
        return RefMatch(20, "looks like a .gguf file, but there is no such file")

    def build(self, need: LoaderNeed, ctx: PluginContext, options: Any) -> Loader:
        from cardcage.plugins.loaders.gguf.source import GgufLoader

        return GgufLoader()
