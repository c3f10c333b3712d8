"""The safetensors loader: a folder becomes a `ModelSource`, its shards a `WeightSource`.

torch is imported by the first `read` only: config and headers of a model can be had without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cardcage.core.contracts import ModelSource, TensorMeta
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.loaders.safetensors.reader import SafetensorsFile, StoredTensor

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_MAX_JSON_BYTES = 1 << 28


class SafetensorsLoader:
    """Opens a folder: config and headers first, bytes when the weights are read."""

    def open(
        self, ref: str, progress: Callable[[str, int, int], None] | None = None
    ) -> ModelSource:
        """Read config.json and every header.

        Raises:
            ModelError: no such folder, or no config.json in it.
            CheckpointError: a shard is missing, truncated or corrupt.
        """
        folder = Path(ref)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{ref}: no config.json there; give a folder in Hugging Face form, with "
                "config.json and *.safetensors"
            )
        return open_folder(folder, ref)


def open_folder(folder: Path, ref: str, name: str = "") -> ModelSource:
    """A `ModelSource` for a local folder; `ref` is how the user named it."""
    config = read_json(folder / "config.json")
    weights = SafetensorsWeights(folder)
    return ModelSource(
        ref=ref,
        path=folder,
        config=config,
        generation_config=read_json(folder / "generation_config.json", missing_ok=True),
        tokenizer=tokenizer_of(folder),
        quant_method=quant_method(config),
        revision=weights.digest(config),
        open_weights=lambda: weights,
        name=name or folder.resolve().name,
    )


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} for a missing one if that is allowed.

    Raises:
        CheckpointError: missing, unreadable, or no JSON object.
    """
    if missing_ok and not path.exists():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for this file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, a JSON object is needed")
    return value


def tokenizer_of(folder: Path) -> dict[str, Any]:
    """What the hf tokenizer needs, {} when the folder has no tokenizer files."""
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return {"use": "hf", "path": str(folder)}
    return {}


def quant_method(config: Mapping[str, Any]) -> str:
    """The checkpoint's `quant_method`, "none" without one.

    Raises:
        CheckpointError: a quantization_config without a method.
    """
    for holder in (config, config.get("text_config") or {}):
        found = holder.get("quantization_config") or holder.get("compression_config")
        if found:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            if not isinstance(method, str):
                raise CheckpointError("config.json: quantization_config names no quant_method")
            return method
    return "none"


class SafetensorsWeights:
    """Tensors of all shards by name, as views of the memory maps.

    With an index, files and tensors that it does not name are ignored (repositories often hold
    a second, consolidated copy).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        self._where: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
        index = folder / INDEX
        if index.is_file():
            self._load_index(read_json(index))
        else:
            self._load_all()

    def _load_index(self, index: dict[str, Any]) -> None:
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
            raise CheckpointError(f"{self._folder / INDEX}: has no weight_map of names to files")
        for shard in sorted(set(names.values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{INDEX} names {shard!r}, which lies outside the folder")
            if not (self._folder / shard).is_file():
                raise CheckpointError(
                    f"{self._folder}: shard {shard} is missing, which {INDEX} names; fetch the "
                    "model again"
                )
            self._files[shard] = SafetensorsFile(self._folder / shard)
        for name, shard in names.items():
            tensor = self._files[shard].tensors.get(name)
            if tensor is None:
                raise CheckpointError(
                    f"{shard} has no tensor {name!r}, although {INDEX} says so; index and shards "
                    "are from different models, fetch them again"
                )
            self._where[name] = (self._files[shard], tensor)

    def _load_all(self) -> None:
        paths = sorted(self._folder.glob("*.safetensors"))
        whole = [p for p in paths if not p.name.startswith("consolidated")]
        for path in whole or paths:
            file = self._files[path.name] = SafetensorsFile(path)
            for name, tensor in file.tensors.items():
                if name in self._where:
                    other = self._where[name][0].path.name
                    raise CheckpointError(
                        f"{self._folder}: {name!r} is in {other} and in {path.name}, and no "
                        f"{INDEX} says which counts; remove one file"
                    )
                self._where[name] = (file, tensor)
        if not self._files:
            raise CheckpointError(
                f"{self._folder}: there is no *.safetensors file (other formats, such as .bin, "
                "are not read); convert the model to safetensors"
            )

    def digest(self, config: Mapping[str, Any]) -> str:
        """Hex SHA-256 over the config and each file's size, header and samples."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        for name, file in sorted(self._files.items()):
            digest.update(name.encode() + b"\0" + file.digest())
        return digest.hexdigest()

    def index(self) -> Mapping[str, TensorMeta]:
        """Every tensor with the shape and dtype of its header."""
        return {
            name: TensorMeta(tensor.shape, tensor.dtype, tensor.nbytes)
            for name, (_, tensor) in self._where.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host. Treat it as read-only.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        import torch

        if name not in self._where:
            raise CheckpointError(f"{self._folder} has no tensor {name}")
        file, tensor = self._where[name]
        dtype = getattr(torch, tensor.dtype)
        if tensor.nbytes == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        raw = torch.frombuffer(
            file.map, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start
        )
        # Offsets need not be aligned to the element size, and view() wants that.
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(tensor.shape)

    def close(self) -> None:
        """Nothing to release: a map lives as long as a tensor that looks into it."""
