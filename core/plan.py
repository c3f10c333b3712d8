"""The resolved plan of plugins: made once in the parent, shipped to children, verified there.

A child never discovers plugins on its own: it gets the plan as JSON, re-reads the metadata of
just the distributions named in it, and stops when it sees another version, another target or
other content than its parent did. `digest` lets ranks on other hosts compare plans.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from cardcage.core.discovery import Candidate, scan
from cardcage.core.errors import PlanMismatch
from cardcage.core.policy import HOST_DIST, Policy
from cardcage.core.resolver import Decision

PLAN_VERSION = 1
_ALL_ROLES = ("core", "frontend", "render", "worker")


@dataclass(frozen=True, slots=True)
class PlanSlot:
    """One chosen plugin. `slot` is what it was chosen for, such as `hardware` or `attention`."""

    slot: str
    kind: str
    id: str
    dist_version: str
    target: str
    location: str
    digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = _ALL_ROLES
    summary: str = ""

    @property
    def dist(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every chosen plugin and what children need beside it. Immutable; equal plans are equal
    JSON. `metrics` are the declared metrics, `env` additions to a child's environment."""

    host_version: str
    slots: tuple[PlanSlot, ...] = ()
    hooks: tuple[str, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    plan_version: int = PLAN_VERSION

    @classmethod
    def make(
        cls,
        decisions: Mapping[str, Decision],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        hooks: Iterable[Candidate] = (),
        env: Mapping[str, str] | None = None,
    ) -> Plan:
        """A plan from decisions by slot name; those without a winner are left out.

        Args:
            options: the validated options by slot name, JSON-able.
            hooks: active hook plugins.
            env: what the platform's `worker_env` asks for.
        """
        from cardcage import __version__

        slots, metrics = [], []
        for slot, decision in sorted(decisions.items()):
            candidate = decision.chosen
            if candidate is None:
                continue
            declaration = candidate.declaration
            roles = tuple(sorted(getattr(declaration, "roles", ()) or _ALL_ROLES))
            metrics += [asdict(m) for m in getattr(declaration, "metrics", ())]
            slots.append(
                _slot(slot, candidate, (options or {}).get(slot, {}), roles, decision.table())
            )
        for candidate in hooks:
            slots.append(_slot(f"hooks.{candidate.name}", candidate, {}, _ALL_ROLES, ""))
        names = tuple(s.slot for s in slots if s.kind == "hooks")
        return cls(__version__, tuple(slots), names, tuple(metrics), dict(env or {}))

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of `to_json`.

        Raises:
            PlanMismatch: not a plan, or one of another plan version.
        """
        try:
            data = json.loads(text)
            version = data.pop("plan_version")
            if version != PLAN_VERSION:
                raise PlanMismatch(f"plan version {version}, this process reads {PLAN_VERSION}")
            data["slots"] = tuple(
                PlanSlot(**{**s, "roles": tuple(s["roles"])}) for s in data["slots"]
            )
            for name in ("hooks", "metrics"):
                data[name] = tuple(data[name])
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanMismatch(f"this is not a plan: {error}") from error

    def digest(self) -> str:
        """SHA-256 of what must agree on every host: everything but the locations and summaries."""
        data = asdict(self)
        for slot in data["slots"]:
            del slot["location"], slot["summary"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def for_role(self, role: str) -> tuple[PlanSlot, ...]:
        """The slots that a process of this role may import."""
        return tuple(s for s in self.slots if role in s.roles)

    def verify(self, who: str = "this process", search_path: list[str] | None = None) -> None:
        """Check in a child that it sees the plugins its parent saw. Imports none of them.

        Args:
            who: the process, for the message ("worker rank 3").
            search_path: folders to look in instead of `sys.path`.

        Raises:
            PlanMismatch: another host version, or a distribution that is missing, of another
                version, with another entry point, or with other content.
        """
        from cardcage import __version__

        if __version__ != self.host_version:
            raise PlanMismatch(
                f"{who} runs cardcage {__version__}, parent runs {self.host_version}"
            )
        seen: dict[tuple[str, str], Candidate] = {}
        if any(s.dist != "module-path" for s in self.slots):
            for candidate in scan(Policy(), search_path):
                if candidate.status != "shadowed":
                    seen.setdefault((candidate.kind, candidate.id), candidate)
        for slot in self.slots:
            _verify(slot, seen, who, search_path)


def _slot(
    slot: str, c: Candidate, options: Mapping[str, Any], roles: tuple[str, ...], summary: str
) -> PlanSlot:
    digest = content_digest(c.dist, c.value, c.builtin)
    return PlanSlot(
        slot, c.kind, c.id, c.version, c.value, c.location, digest, dict(options), roles, summary
    )


def _verify(
    slot: PlanSlot,
    seen: Mapping[tuple[str, str], Candidate],
    who: str,
    search_path: list[str] | None,
) -> None:
    parent = f"parent saw {slot.dist_version} at {slot.location}"
    location = slot.location
    if slot.dist != "module-path":
        found = seen.get((slot.kind, slot.id))
        if found is None:
            raise PlanMismatch(f"{who} does not see {slot.id} ({slot.kind}), {parent}")
        location = found.location
        sees = f"{who} sees {slot.dist} {found.version} at {location}"
        if found.version != slot.dist_version:
            raise PlanMismatch(f"{sees}, {parent}")
        if found.value != slot.target:
            raise PlanMismatch(
                f"{sees} with {slot.id} = {found.value}, {parent} with {slot.target}"
            )
    digest = content_digest(slot.dist, slot.target, slot.dist == HOST_DIST, search_path)
    if digest != slot.digest:
        raise PlanMismatch(
            f"{who} sees other content of {slot.id} at {location} ({digest[:19]}), "
            f"{parent} ({slot.digest[:19]})"
        )


def content_digest(
    dist: str, target: str, builtin: bool, search_path: list[str] | None = None
) -> str:
    """`record:` and the hash of a distribution's RECORD; `files:` and the hash of the
    declaration's sources where there is no fixed RECORD (checkout, editable, module path).

    Content is hashed, not times, so that two hosts with the same code agree.
    """
    if not builtin and dist != "module-path":
        where = sys.path if search_path is None else search_path
        for found in Distribution.discover(name=dist, path=list(where)):
            record = found.read_text("RECORD")
            if record and '"editable": true' not in (found.read_text("direct_url.json") or ""):
                return "record:" + hashlib.sha256(record.encode()).hexdigest()
            break
    total = hashlib.sha256()
    for path in _sources(target.partition(":")[0], search_path):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return "files:" + total.hexdigest()


def _sources(module: str, search_path: list[str] | None) -> list[Path]:
    """The files of a declaration, found without importing any of its packages."""
    loaded = sys.modules.get(module)
    if search_path is None and loaded is not None and getattr(loaded, "__file__", None):
        return _files(Path(str(loaded.__file__)))
    from importlib.machinery import PathFinder

    parts = module.split(".")
    spec = PathFinder.find_spec(parts[0], search_path)
    if spec is None:
        from importlib.util import find_spec

        spec = find_spec(parts[0])  # editable installs with an import hook
    if spec is None:
        return []
    if len(parts) == 1 and spec.origin:
        return _files(Path(spec.origin))
    for base in spec.submodule_search_locations or ():
        path = Path(base).joinpath(*parts[1:])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return _files(file)
    return []


def _files(file: Path) -> list[Path]:
    if file.name == "__init__.py":
        return sorted(file.parent.glob("*.py"))
    return [file]
