"""Model folders: single file, shards, and every way of being broken."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.loaders.safetensors import Safetensors
from cardcage.plugins.loaders.safetensors.reader import SafetensorsFile

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.randn(5, 3).bfloat16(),
    "c": torch.arange(7, dtype=torch.int32),
    "d": torch.tensor([True, False, True]),
    "e": torch.randn(4).half(),
    "f": torch.randn(2, 2).to(torch.float8_e4m3fn),
    "g": torch.tensor(3.5),
    "h": torch.empty(0, 4),
}


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def open_ref(path: Path) -> ModelSource:
    return Safetensors().build(None, None, None).open(str(path))  # type: ignore[arg-type]


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_recognises_folders(tmp_path: Path) -> None:
    match = Safetensors().recognise(str(folder(tmp_path / "m")))
    assert match is not None
    assert match.score == 90
    (tmp_path / "n").mkdir()
    other = Safetensors().recognise(str(tmp_path / "n"))
    assert other is not None
    assert other.score < 50
    assert Safetensors().recognise("org/name") is None
    assert Safetensors().recognise("") is None
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_ref(tmp_path / "n")


def test_every_tensor_equals_what_was_saved(tmp_path: Path) -> None:
    source = open_ref(folder(tmp_path / "m", TENSORS, eos_token_id=3))
    weights = source.open_weights()
    index = weights.index()
    assert set(index) == set(TENSORS)
    for name, tensor in TENSORS.items():
        got = weights.read(name)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape == index[name].shape
        assert index[name].nbytes == tensor.numel() * tensor.itemsize
        assert got.contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.view(-1).view(torch.uint8).tolist()
        )
    assert index["b.weight"].dtype == "bfloat16"
    assert source.quant_method == "none"
    assert source.config["eos_token_id"] == 3
    assert source.name == "m"
    assert source.tokenizer == {}
    assert source.generation_config == {}
    with pytest.raises(CheckpointError, match="no tensor z"):
        weights.read("z")


def test_side_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", TENSORS, quantization_config={"quant_method": "fp8"})
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    (path / "tokenizer.json").write_text("{}")
    source = open_ref(path)
    assert source.generation_config == {"temperature": 0.6}
    assert source.tokenizer == {"use": "hf", "path": str(path)}
    assert source.quant_method == "fp8"
    nested = folder(tmp_path / "n", TENSORS, text_config={
        "quantization_config": {"quant_method": "awq"}})  # fmt: skip
    assert open_ref(nested).quant_method == "awq"
    odd = folder(tmp_path / "o", TENSORS, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="names no quant_method"):
        open_ref(odd)


def shards(path: Path) -> Path:
    folder(path)
    names = list(TENSORS)
    save_file({n: TENSORS[n] for n in names[:3]}, path / "model-00001-of-00002.safetensors")
    save_file({n: TENSORS[n] for n in names[3:]}, path / "model-00002-of-00002.safetensors")
    weight_map = {n: f"model-0000{1 + (i >= 3)}-of-00002.safetensors" for i, n in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_shards_with_an_index(tmp_path: Path) -> None:
    path = shards(tmp_path / "m")
    save_file({"stray": torch.zeros(2)}, path / "consolidated.safetensors")  # not in the index
    weights = open_ref(path).open_weights()
    assert set(weights.index()) == set(TENSORS)
    assert torch.equal(weights.read("a.weight"), TENSORS["a.weight"])
    assert torch.equal(weights.read("e"), TENSORS["e"])


def test_broken_shards(tmp_path: Path) -> None:
    path = shards(tmp_path / "m")
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002.* is missing"):
        open_ref(path)
    path = shards(tmp_path / "n")
    save_file({"other": torch.zeros(1)}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor 'd'"):
        open_ref(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"d": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_ref(path)
    for text in ("[]", "{}", "{", '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError):
            open_ref(path)


def test_without_an_index(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"a": torch.zeros(2)})
    save_file({"a": torch.ones(2)}, path / "consolidated.safetensors")  # a second copy
    assert open_ref(path).open_weights().read("a").tolist() == [0, 0]
    save_file({"a": torch.ones(2)}, path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in model.* and in other"):
        open_ref(path)
    empty = folder(tmp_path / "n")
    (empty / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_ref(empty)


def test_broken_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", TENSORS)
    for text in ("", "{", "[1]", '"x"', "[" * 100_000):
        (path / "config.json").write_text(text)
        with pytest.raises(CheckpointError):
            open_ref(path)


def test_every_cut_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", TENSORS)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for cut in range(0, len(whole), 3):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            open_ref(path)


def test_flipped_header_bytes(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", TENSORS)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    rng = random.Random(2)
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.randrange(8 + length)] = rng.randrange(256)
        file.write_bytes(broken)
        try:
            weights = open_ref(path).open_weights()
            for name in weights.index():
                weights.read(name)
        except CheckpointError:
            pass


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"1234", "too few"),
        (struct.pack("<Q", 1 << 62) + b"{}", "claims a header"),
        (raw(b"{}", length=100), "claims a header"),
        (raw(b"\xff\xfe"), "no JSON"),
        (raw([1]), "no JSON object"),
        (raw(b'{"a": 1, "a": 2}'), "occurs twice"),
        (raw({"a": 3}), "is no object"),
        (raw({"a": {**A, "dtype": "Q4"}}, b"\0" * 8), "'Q4'"),
        (raw({"a": {**A, "shape": [-2]}}, b"\0" * 8), "malformed"),
        (raw({"a": {**A, "shape": [True]}}, b"\0" * 8), "malformed"),
        (raw({"a": {**A, "data_offsets": [0]}}, b"\0" * 8), "malformed"),
        (raw({"a": {**A, "shape": [3]}}, b"\0" * 8), "needs 12 bytes"),
        (raw({"a": {**A, "data_offsets": [8, 0]}}, b"\0" * 8), "needs 8 bytes"),
        (raw({"a": A}, b"\0" * 4), "ends at data byte 8 of 4"),
        (raw({"a": A, "b": {**A, "data_offsets": [4, 12]}}, b"\0" * 12), "overlap"),
        (raw({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
             b"\0" * 8), "needs"),
    ],
)  # fmt: skip
def test_corrupt_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_gaps_and_odd_offsets_are_fine(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    header = {"__metadata__": {"x": "y"}, "a": {**A, "data_offsets": [3, 11]}}
    data = b"\0" * 3 + struct.pack("<2f", 1.5, -2.0)
    (path / "model.safetensors").write_bytes(raw(header, data))
    assert open_ref(path).open_weights().read("a").tolist() == [1.5, -2.0]


def test_revision_follows_content(tmp_path: Path) -> None:
    first = open_ref(folder(tmp_path / "a", {"w": torch.zeros(4000)})).revision
    assert first == open_ref(folder(tmp_path / "b", {"w": torch.zeros(4000)})).revision
    assert first != open_ref(folder(tmp_path / "c", {"w": torch.ones(4000)})).revision
    assert first != open_ref(folder(tmp_path / "d", {"w": torch.zeros(4000)}, x=1)).revision
