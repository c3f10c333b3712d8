"""Hub references, with a stand-in for huggingface_hub: no network in tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.loaders.hub import Hub
from tests.support import gguf_files as g


def open_ref(ref: str, progress: Any = None) -> ModelSource:
    return Hub().build(None, None, None).open(ref, progress)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ref", ["org/name", "org/name@main", "org/na.me_1@refs/pr/3", "org/name:a/b.gguf", "hf:o/n"]
)
def test_recognised(ref: str) -> None:
    match = Hub().recognise(ref)
    assert match is not None
    assert match.score == (100 if ref.startswith("hf:") else 40)


@pytest.mark.parametrize(
    "ref", ["", "name", "a/b/c", "./model", "/abs/model", "pypi:a/b", "dummy:a/b", "dir/m.gguf",
            "org/name@", "../x", "a b/c"]
)  # fmt: skip
def test_not_recognised(ref: str) -> None:
    assert Hub().recognise(ref) is None


def test_a_local_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Hub().recognise("org/name") is None


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"cardcage\[hub\]"):
        open_ref("org/name")


class FakeHub(ModuleType):
    """Remembers what it was asked for; answers with a path or raises."""

    def __init__(self, answer: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.answer, self.asked = answer, []

    def _give(self, *args: Any, **options: Any) -> str:
        self.asked.append((args, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        bar = options.get("tqdm_class")
        if bar is not None:
            with bar(total=100, unit="B", initial=10, name="x") as shown:
                shown.update(40)
            with bar(total=2, unit="it", desc="Fetching") as shown:
                shown.update(1)
        return str(self.answer)

    hf_hub_download = snapshot_download = _give


def install(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> FakeHub:
    fake = FakeHub(answer)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    fake = install(monkeypatch, tmp_path)
    seen: list[Any] = []
    source = open_ref("org/name@v1.0", lambda *step: seen.append(step))
    assert source.name == "org/name"
    assert source.ref == "org/name@v1.0"
    args, options = fake.asked[0]
    assert args == ("org/name",)
    assert options["revision"] == "v1.0"
    assert "*.safetensors" in options["allow_patterns"]
    assert seen == [("download org/name", 50, 100)]  # bytes only, not the count of files


def test_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = g.write(tmp_path / "m.gguf", g.llama(), g.layer())
    fake = install(monkeypatch, path)
    source = open_ref("hf:org/name:sub/m.gguf")
    assert source.quant_method == "gguf"
    assert fake.asked == [(("org/name", "sub/m.gguf"), {"revision": None})]


def kind(name: str, *bases: type) -> type[Exception]:
    return type(name, bases or (Exception,), {})


REPO = kind("RepositoryNotFoundError")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (kind("GatedRepoError", REPO)("x"), "gated"),
        (kind("RevisionNotFoundError")("x"), "not this revision"),
        (REPO("x"), "no such repository"),
        (kind("LocalEntryNotFoundError", FileNotFoundError)("x"), "local cache"),
        (kind("OfflineModeIsEnabled", ConnectionError)("x"), "offline"),
        (kind("EntryNotFoundError")("x"), "no such file"),
        (OSError("disk is full\nmore"), r"disk is full\)"),
        (ValueError(""), "ValueError"),
    ],
)
def test_failures_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    install(monkeypatch, error)
    with pytest.raises(ModelError, match=message) as caught:
        open_ref("org/name")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_broken_repository_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=r"org/name:file\.gguf"):
        open_ref("org/name")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="safetensors"):
        open_ref("org/name")


def test_offline_with_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="local cache"):
        open_ref("cardcage-tests/no-such-model")
