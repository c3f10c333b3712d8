"""The gguf loader: a `ModelSource` and a zero-copy `WeightSource` over one file.

torch is imported by the first `read` only: config and tokenizer of a model can be had without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cardcage.core.contracts import ModelSource, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.loaders.gguf.config import generation_config, hf_config
from cardcage.plugins.loaders.gguf.names import Entry, hf_names
from cardcage.plugins.loaders.gguf.reader import GgufFile

if TYPE_CHECKING:
    import torch

_PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class GgufLoader:
    """Opens a GGUF file: header first, bytes when the weights are read."""

    def open(
        self, ref: str, progress: Callable[[str, int, int], None] | None = None
    ) -> ModelSource:
        """Read the header of the file at `ref`.

        Raises:
            ModelError: there is no such file.
            CheckpointError: the file is truncated, corrupt or incomplete.
            UnsupportedModel: an architecture or layout that is not known.
        """
        path = Path(ref)
        if not path.is_file():
            raise ModelError(f"{ref}: there is no such file; give the path of a .gguf file")
        return open_gguf(path, ref)


def open_gguf(path: Path, ref: str, name: str = "") -> ModelSource:
    """A `ModelSource` for a GGUF file; `ref` is how the user named it."""
    file = GgufFile(path)
    if int(file.metadata.get("split.count", 1) or 1) > 1:
        raise ModelError(
            f"{path.name}: a file split in {file.metadata['split.count']} parts is not supported; "
            "join the parts with gguf-split --merge"
        )
    config = hf_config(file)
    entries = hf_names(file, str(file.metadata["general.architecture"]), config)
    tokenizer: dict[str, Any] = {}
    if "tokenizer.ggml.model" in file.metadata:
        kept = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
        kept["general.architecture"] = file.metadata["general.architecture"]
        tokenizer = {"use": "gguf", "path": str(path), "metadata": kept}
    return ModelSource(
        ref=ref,
        path=path,
        config=config,
        generation_config=generation_config(file),
        tokenizer=tokenizer,
        quant_method="gguf",
        revision=file.digest(),
        open_weights=lambda: GgufWeights(file, entries),
        name=name or path.stem,
    )


class GgufWeights:
    """Tensors by Hugging Face name, as views of the memory map wherever nothing must change.

    Plain types come with their own dtype, packed ones as uint8 [N, bytes per row].
    """

    def __init__(self, file: GgufFile, entries: Mapping[str, Entry]) -> None:
        self._file = file
        self._entries = entries

    def index(self) -> Mapping[str, TensorMeta]:
        """Every tensor: logical shape, dtype ("packed" for block types), bytes, encoding."""
        index = {}
        for name, entry in self._entries.items():
            kind = entry.tensor.type.name
            plain = _PLAIN.get(kind)
            index[name] = TensorMeta(
                shape=entry.shape,
                dtype=plain or "packed",
                nbytes=entry.nbytes,
                encoding=f"gguf:{kind}" if plain is None else "none",
            )
        return index

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name on the host. Treat it as read-only.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        import torch

        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._file.path.name} has no tensor {name}")
        start = entry.tensor.start + (entry.expert or 0) * entry.nbytes
        raw = torch.frombuffer(self._file.map, dtype=torch.uint8, count=entry.nbytes, offset=start)
        plain = _PLAIN.get(entry.tensor.type.name)
        if plain is not None:
            dtype = getattr(torch, plain)
            # Alignment of a type's own size is all that view() needs; offsets are multiples of
            # the file's alignment, which may be as low as 1.
            aligned = raw.data_ptr() % dtype.itemsize == 0
            value = (raw if aligned else raw.clone()).view(dtype).view(entry.shape)
        else:
            value = raw.view(*entry.shape[:-1], entry.tensor.row_bytes)
        if entry.heads:
            value = _unpermute(value, entry.heads)
        return value - 1 if entry.minus_one else value

    def close(self) -> None:
        """Nothing to release: the map lives as long as a tensor that looks into it."""


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [H * D, ...] from interleaved to half-split rotary order; copies."""
    tail = rows.shape[1:]
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *tail)
    return pairs.transpose(1, 2).reshape(rows.shape)
