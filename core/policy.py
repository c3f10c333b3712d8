"""Which installed plugins may be imported at all: decided from metadata, before any import.

Modes: `all` (default), `allow-listed`, `builtin-only`. Deny wins over allow. Patterns are
`dist`, `dist/name` or `dist/kind:name`, with shell wildcards. The environment variable
CARDCAGE_PLUGINS overrides mode and allow list: `none`, `all`, or a comma-separated list of
distributions. A pin compares the SHA-256 of a distribution's RECORD and of the files it lists.
It confines nothing: `.pth` files and build hooks of an installed package run anyway.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from cardcage.core.errors import ConfigError

MODES = ("all", "allow-listed", "builtin-only")
HOST_DIST = "cardcage"


def normalize(dist: str) -> str:
    """A distribution name in PEP 503 form, so that Acme_KV and acme-kv are one."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def matches(pattern: str, kind: str, name: str, dist: str) -> bool:
    """Whether `dist`, `dist/name` or `dist/kind:name` (with wildcards) covers a plugin."""
    head, slash, tail = pattern.partition("/")
    if not fnmatchcase(dist, normalize(head)):
        return False
    if not slash:
        return True
    kind_part, colon, name_part = tail.partition(":")
    if not colon:
        kind_part, name_part = "*", tail
    return fnmatchcase(kind, kind_part) and fnmatchcase(name, name_part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The `plugins` table of the config, plus CARDCAGE_PLUGINS.

    `auto` lists distributions that may win an automatic choice although a built-in fits;
    `prefer` lists full ids that win a conflict of short names; `strict` turns side effects of
    an import into errors; `allow_files` permits `/abs/file.py:Class` as a module path.
    """

    mode: str = "all"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    pin: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    allow_files: bool = False
    mode_source: str = "plugins.mode"
    allow_source: str = "plugins.allow"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"plugins.mode is {self.mode!r}; allowed: {', '.join(MODES)}")
        pins = {normalize(dist): value for dist, value in self.pin.items()}
        object.__setattr__(self, "pin", pins)
        for dist, value in pins.items():
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
                raise ConfigError(
                    f"plugins.pin.{dist} is {value!r}; write sha256: and 64 hexadecimal digits"
                )

    @classmethod
    def from_config(
        cls, table: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> Policy:
        """The policy of a resolved `plugins` table (a mapping, or None for defaults).

        Args:
            table: keys mode, allow, deny, auto, prefer, pin, strict, allow_files.
            env: environment to read CARDCAGE_PLUGINS from; None reads the process's own.

        Raises:
            ConfigError: an unknown mode, key or malformed pin.
        """
        values = dict(table or {})
        for name in ("allow", "deny", "auto", "prefer"):
            values[name] = tuple(values.get(name) or ())
        try:
            policy = cls(**values)
        except TypeError as error:
            raise ConfigError(f"plugins: {error}") from error
        text = (os.environ if env is None else env).get("CARDCAGE_PLUGINS")
        if text is None:
            return policy
        source = f"CARDCAGE_PLUGINS={text}"
        listed = tuple(part.strip() for part in text.split(",") if part.strip())
        if not listed or listed == ("none",):
            return replace(policy, mode="builtin-only", mode_source=source)
        if listed == ("all",):
            return replace(policy, mode="all", mode_source=source)
        return replace(
            policy, mode="allow-listed", allow=listed, mode_source=source, allow_source=source
        )

    @classmethod
    def configured(cls, files: Sequence[str] = ()) -> Policy:
        """The policy of the configured sources; the config (and pydantic) is read only when a
        file or a CARDCAGE_PLUGINS__* variable could set it.

        Raises:
            ConfigError: a source is wrong.
        """
        system = Path(os.environ.get("CARDCAGE_CONFIG_DIR", "/etc/cardcage"))
        present = system.is_dir() and any(system.glob("*.toml"))
        if files or present or any(name.startswith("CARDCAGE_PLUGINS__") for name in os.environ):
            from cardcage.core.config import load_config

            return cls.from_config(load_config(files).as_dict()["plugins"])
        return cls.from_config()

    def verdict(self, kind: str, name: str, dist: str) -> str | None:
        """The rule that blocks a plugin, or None. Pure text comparison; nothing is imported."""
        for pattern in self.deny:
            if matches(pattern, kind, name, dist):
                return f'blocked by plugins.deny "{pattern}"'
        if dist == HOST_DIST:
            return None
        if self.mode == "builtin-only":
            return f"blocked by {self._mode_text()}"
        if self.mode == "allow-listed" and not any(
            matches(p, kind, name, dist) for p in self.allow
        ):
            return f"not in {self.allow_source}" + (
                "" if self.allow_source.startswith("CARDCAGE") else f" ({self._mode_text()})"
            )
        return None

    def _mode_text(self) -> str:
        if self.mode_source.startswith("CARDCAGE"):
            return self.mode_source
        return f"{self.mode_source} = {self.mode}"

    def pin_problem(self, dist: str, metadata: Distribution) -> str | None:
        """Why a pinned distribution may not be used, or None (also when it has no pin)."""
        wanted = self.pin.get(dist)
        if wanted is None:
            return None
        record = metadata.read_text("RECORD")
        if record is None or '"editable": true' in (metadata.read_text("direct_url.json") or ""):
            return f"plugins.pin.{dist}: an editable install has no fixed content to pin"
        got = record_digest(record)
        if got != wanted:
            return f"plugins.pin.{dist} is {wanted}, the installed RECORD is {got}"
        changed = _changed_file(metadata, record)
        return None if changed is None else f"plugins.pin.{dist}: {changed}"


def record_digest(record: str) -> str:
    """`sha256:...` of a RECORD's text, the form that `plugins.pin` holds."""
    import hashlib

    return "sha256:" + hashlib.sha256(record.encode()).hexdigest()


def _changed_file(metadata: Distribution, record: str) -> str | None:
    """The first listed file whose content differs from its hash in RECORD."""
    import base64
    import csv
    import hashlib

    for row in csv.reader(record.splitlines()):
        if len(row) < 2 or not row[1].startswith("sha256="):
            continue
        path = Path(str(metadata.locate_file(row[0])))
        if not path.is_file():
            return f"{row[0]} is listed in RECORD but missing"
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
        if digest.rstrip(b"=").decode() != row[1].removeprefix("sha256="):
            return f"{row[0]} differs from its hash in RECORD"
    return None
