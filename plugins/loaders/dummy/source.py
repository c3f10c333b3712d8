"""The dummy loader: a config is read, weights are made up (see `weights`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from cardcage.core.contracts import ModelSource, WeightSource
from cardcage.core.errors import ModelError
from cardcage.plugins.loaders.dummy import PREFIX
from cardcage.plugins.loaders.safetensors.source import quant_method, read_json, tokenizer_of


class DummyLoader:
    """Reads a config, never a weight."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open(
        self, ref: str, progress: Callable[[str, int, int], None] | None = None
    ) -> ModelSource:
        """A source for the config that `dummy:PATH` names.

        Raises:
            ModelError: there is no config at that path, or it declares a quantization.
            CheckpointError: the config is no JSON object.
        """
        path = Path(ref.removeprefix(PREFIX))
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"{ref}: there is no {path}; give the path of a config.json")
        config = read_json(path)
        if quant_method(config) != "none":
            raise ModelError(
                f"{ref}: the config declares quant_method {quant_method(config)!r}; random weights "
                "are made unquantized only, remove quantization_config from a copy"
            )
        folder = path.parent
        name = folder.resolve().name if path.name == "config.json" else path.stem
        content = path.read_bytes() + self.seed.to_bytes(8, "little")
        return ModelSource(
            ref=ref,
            path=folder,
            config=config,
            generation_config=read_json(folder / "generation_config.json", missing_ok=True),
            tokenizer=tokenizer_of(folder),
            quant_method="none",
            revision="dummy-" + hashlib.sha256(content).hexdigest(),
            open_weights=self._weights,
            name=name,
        )

    def _weights(self) -> WeightSource:
        from cardcage.plugins.loaders.dummy.weights import DummyWeights

        return DummyWeights(self.seed)
