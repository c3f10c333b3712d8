"""Fixtures of the core's tests: plugins that exist only on disk, in a folder of the test."""

from __future__ import annotations

import base64
import hashlib
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

DECLARATION = '''
from cardcage.core.contracts import *

class {cls}:
    """A plugin of a test."""
    name = "{name}"
    api = "{kind}>=1.0,<2"
    caps = {caps}
    options = None
    {extra}
    def build(self, need, ctx, options):
        return self
'''


class FakeSite:
    """A folder on the path, with distributions that tests write into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        dist: str,
        entries: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
        record: bool = False,
        metadata_name: str | None = None,
    ) -> FakeSite:
        """Write `dist` with entry points {kind: {name: value}} and modules {path: source}."""
        for name, source in (modules or {}).items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {metadata_name or dist}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n\nA test.\n")
        text = ""
        for kind, named in entries.items():
            text += f"[cardcage.{kind}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items())
        (info / "entry_points.txt").write_text(text)
        if record:
            rows = []
            for name in modules or {}:
                data = (self.path / name).read_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                rows.append(f"{name},sha256={digest.decode()},{len(data)}")
            (info / "RECORD").write_text("\n".join(rows) + "\n")
        return self

    def plugin(
        self,
        dist: str,
        kind: str,
        name: str,
        caps: str,
        extra: str = "",
        version: str = "1.0",
        before: str = "",
        **options: object,
    ) -> FakeSite:
        """Write a distribution with one well-formed declaration."""
        module = dist.replace("-", "_")
        cls = name.replace("-", "_").title().replace("_", "")
        body = textwrap.indent(textwrap.dedent(extra), "    ").lstrip()
        source = textwrap.dedent(before) + DECLARATION.format(
            cls=cls, name=name, kind=kind, caps=caps, extra=body
        )
        return self.add(
            dist,
            {kind: {name: f"{module}.plugin:{cls}"}},
            {f"{module}/__init__.py": "", f"{module}/plugin.py": source},
            version=version,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """An empty folder on `sys.path`; what is imported from it is forgotten afterwards."""
    found = FakeSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(found.path))
    before = set(sys.modules)
    yield found
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if str(tmp_path) in file or name.startswith("cardcage_file_"):
            del sys.modules[name]
