"""Model folders in Hugging Face form: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cardcage.core.contracts import Loader, LoaderCaps, LoaderNeed, PluginContext, RefMatch


class Safetensors:
    """Reads a local folder; one file or shards with an index."""

    name = "safetensors"
    api = "loaders>=1.0,<2"
    caps = LoaderCaps(priority=50)

    def recognise(self, ref: str) -> RefMatch | None:
        """A folder with a config.json."""
        path = Path(ref)
        if not ref or not path.is_dir():
            return None
        if (path / "config.json").is_file():
            return RefMatch(90, "a folder with a config.json")
        return RefMatch(20, "a folder, but without a config.json")

    def build(self, need: LoaderNeed, ctx: PluginContext, options: Any) -> Loader:
        from cardcage.plugins.loaders.safetensors.source import SafetensorsLoader

        return SafetensorsLoader()
