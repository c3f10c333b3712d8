"""The one door to plugins: list them (metadata), load a declaration, choose, build.

`Registry.discover()` reads metadata only. `resolve` returns an explained `Decision`; `build`
validates the options and makes the winner's object. A registry is a snapshot of what was
installed when it was made. Nothing of it is used inside a step.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cardcage.core.contracts import API, CAPS_OF, KINDS, Need
from cardcage.core.discovery import Candidate, scan
from cardcage.core.errors import ConfigError, EngineError, PluginLoadError, SelectionError
from cardcage.core.loading import (
    PROTOCOL_OF,
    describe,
    load_declaration,
    protocol_members,
    protocol_problem,
)
from cardcage.core.policy import Policy, normalize
from cardcage.core.resolver import Decision, Row, consider, decide, did_you_mean


class Registry:
    """Installed plugins, their state, and the policy they are used under."""

    def __init__(self, candidates: Iterable[Candidate], policy: Policy) -> None:
        self.policy = policy
        self._candidates = list(candidates)
        self._lock = threading.RLock()

    @classmethod
    def discover(
        cls, policy: Policy | None = None, search_path: list[str] | None = None
    ) -> Registry:
        """List every installed plugin by its metadata; imports none of them.

        Args:
            policy: None means the defaults plus CARDCAGE_PLUGINS of the environment.
            search_path: folders to scan for distributions instead of `sys.path`. To import
                from them they must be on `sys.path` as well.
        """
        policy = Policy.from_config() if policy is None else policy
        return cls(scan(policy, search_path), policy)

    def candidates(self, kind: str | None = None) -> list[Candidate]:
        """Candidates of a kind (or all), blocked and broken ones included."""
        if kind is None:
            return list(self._candidates)
        self._check_kind(kind)
        return [c for c in self._candidates if c.kind == kind]

    def load(self, candidate: Candidate) -> Any:
        """The declaration of a candidate, imported on the first call and kept.

        Raises:
            PluginLoadError: blocked by policy (then nothing is imported), broken, or
                incompatible. A failure is remembered and raised again.
        """
        with self._lock:
            if candidate.declaration is not None:
                return candidate.declaration
            if candidate.error is not None:
                raise candidate.error
            if not candidate.usable and candidate.status != "ambiguous":
                why = "; ".join(candidate.reasons)
                raise PluginLoadError(
                    f"{candidate.kind} plugin {candidate.id} is {candidate.status}: {why}"
                )
            return load_declaration(candidate, strict=self.policy.strict)

    def resolve(
        self,
        kind: str,
        need: Need,
        use: str = "auto",
        prefer: Sequence[str] = (),
        hardware_order: Sequence[str] = (),
    ) -> Decision:
        """Choose a plugin of a kind for a need; see `resolver.decide` for the rules.

        Raises:
            SelectionError: nothing fits, the named one does not fit, or the name is unknown.
                The message ends with the table of reasons.
        """
        self._check_kind(kind)
        try:
            decision = decide(self, kind, need, use, prefer, hardware_order)
        except SelectionError as error:
            if error.table:
                raise
            rows = [Row(c, c.status, list(c.reasons)) for c in self.candidates(kind)]
            listing = Decision(kind, "", "installed", None, rows).table()
            raise SelectionError(str(error), listing) from error
        if decision.chosen is None:
            if use == "auto":
                raise SelectionError(f"{kind}: {decision.note}", decision.table(note=False))
            first = decision.rows[0]
            raise SelectionError(
                f'{kind} "{use}" cannot be used: {first.text()}', decision.table()
            ) from first.candidate.error
        return decision

    def explain(
        self,
        kind: str,
        need: Need,
        use: str = "auto",
        prefer: Sequence[str] = (),
        hardware_order: Sequence[str] = (),
        ask_all: bool = False,
    ) -> Decision:
        """As `resolve`, but returns the decision when nothing fits (`chosen` is None)."""
        self._check_kind(kind)
        return decide(self, kind, need, use, prefer, hardware_order, ask_all)

    def build(
        self,
        chosen: Decision | Candidate,
        need: Need,
        ctx: Any,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Validate the options and build the object of a decision or candidate.

        Args:
            chosen: a decision with a winner, or a candidate.
            need: handed to the plugin as it is.
            ctx: a `PluginContext`.
            options: the plugin's table of the config, None for none.

        Raises:
            ConfigError: an option that the plugin's own model refuses, with its config path.
            PluginLoadError: `build` raised something of its own, or the object lacks a method.
            EngineError: whatever the plugin raised from the exception tree, unchanged.
        """
        candidate = chosen.chosen if isinstance(chosen, Decision) else chosen
        if candidate is None:
            raise SelectionError("a decision without a winner cannot be built")
        declaration = self.load(candidate)
        checked = validate_options(candidate, declaration, options)
        try:
            built = declaration.build(need, ctx, checked)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{candidate.kind} plugin {candidate.id} {candidate.version} could not be "
                f"built: {describe(error)}"
            ) from error
        problem = protocol_problem(candidate.kind, built)
        if problem:
            raise PluginLoadError(
                f"{candidate.kind} plugin {candidate.id}: what build() returned is not "
                f"whole: {problem}"
            )
        return built

    def from_module_path(
        self, kind: str, module_path: str, type_name: str | None = None, where: str = ""
    ) -> Candidate:
        """A loaded candidate from a module named in the config, without an entry point.

        Args:
            module_path: `acme.nvme`, or `acme.nvme:Nvme`; `/abs/file.py:Nvme` only with
                `plugins.allow_files`.
            type_name: the class, unless `module_path` names it.
            where: the config path, for messages (`kv.tiers[1]`).

        Raises:
            PluginLoadError: it cannot be imported, has no such class, or the class is neither
                a declaration nor an implementation of the kind. Blocked by policy.
        """
        self._check_kind(kind)
        place = f"{where}: " if where else ""
        path, _, attribute = module_path.partition(":")
        attribute = attribute or (type_name or "")
        if not attribute:
            raise PluginLoadError(f"{place}module_path {module_path!r} needs a type (class name)")
        dist, version = _owner(path)
        rule = self.policy.verdict(kind, attribute, dist)
        if rule and dist:
            raise PluginLoadError(f"{place}{module_path} belongs to {dist}, {rule}")
        if path.endswith(".py"):
            path = self._file_module(path, place)
        candidate = Candidate(
            kind, attribute, dist or "module-path", version, f"{path}:{attribute}", path
        )
        with self._lock:
            return _load_by_path(candidate, place, self.policy.strict)

    def _file_module(self, path: str, place: str) -> str:
        if not self.policy.allow_files:
            raise PluginLoadError(
                f"{place}{path} is a file; set plugins.allow_files = true to load plugin files"
            )
        name = "cardcage_file_" + "".join(c if c.isalnum() else "_" for c in path)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PluginLoadError(f"{place}{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            sys.modules.pop(name, None)
            raise PluginLoadError(f"{place}cannot load {path}: {describe(error)}") from error
        return name

    def options_for(
        self, candidate: Candidate, table: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """A candidate's options in the config's `plugin` table: the most exact key wins.

        Keys: `dist/kind:name`, `dist/name`, or a bare `name` for bundled plugins.
        """
        exact = f"{candidate.dist}/{candidate.kind}:{candidate.name}"
        keys = [exact, candidate.id] + ([candidate.name] if candidate.builtin else [])
        return next((table[k] for k in keys if k in table), None)

    def table_warnings(self, table: Mapping[str, Any]) -> list[str]:
        """Keys of the config's `plugin` table that no installed plugin answers to."""
        known: set[str] = set()
        for c in self._candidates:
            known |= {c.id, f"{c.dist}/{c.kind}:{c.name}", *([c.name] if c.builtin else [])}
        return [
            f'plugin."{key}": its options are not used, no such plugin is installed'
            f"{did_you_mean(key, sorted(known))}"
            for key in table
            if key not in known
        ]

    def summary_line(self) -> str:
        """One line for the start-up log: how many plugins, which third-party, which broken."""
        ours = sum(c.builtin for c in self._candidates)
        foreign = [c for c in self._candidates if not c.builtin]
        names = ", ".join(f"{c.dist} {c.version}: {c.kind}/{c.name}" for c in foreign)
        bad = [c for c in self._candidates if c.status in ("broken", "incompatible")]
        text = f"plugins: {ours} built-in, {len(foreign)} third-party"
        text += f" ({names})" if names else ""
        return text + (f", {len(bad)} broken (run cardcage plugins doctor)" if bad else "")

    def warnings(self) -> list[str]:
        """Sentences worth a WARNING at start: conflicts of names, broken plugins, side effects."""
        found = []
        for c in self._candidates:
            if c.status in ("ambiguous", "broken", "incompatible", "unknown-kind"):
                found.append(f"{c.kind} plugin {c.id} {c.version} is {c.status}: {c.reasons[0]}")
            found += [f"{c.kind} plugin {c.id}: {text}" for text in c.warnings]
        return found

    def consider(self, candidate: Candidate, need: Need) -> Row:
        """One candidate against a need, as a row of a decision."""
        return consider(self, candidate, need)

    def _check_kind(self, kind: str) -> None:
        if kind not in KINDS:
            raise SelectionError(
                f"there is no plugin kind {kind!r}{did_you_mean(kind, KINDS)} "
                f"(kinds: {', '.join(KINDS)})"
            )


def validate_options(
    candidate: Candidate, declaration: Any, options: Mapping[str, Any] | None
) -> Any:
    """The plugin's options as its own pydantic model; None when it has none.

    Raises:
        ConfigError: naming `plugin."dist/name".field`, the value, and the nearest known field.
    """
    model = getattr(declaration, "options", None)
    where = f'plugin."{candidate.id}"'
    if model is None:
        if options:
            raise ConfigError(f"{where}: this plugin takes no options, got {sorted(options)}")
        return None
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(options or {}))
    except ValidationError as error:
        lines = []
        for item in error.errors():
            path = ".".join(str(p) for p in item["loc"])
            text = item["msg"]
            if item["type"] == "extra_forbidden":
                text = "unknown option" + did_you_mean(path, list(model.model_fields))
            elif item["type"] != "missing":
                text += f", got {str(item['input'])[:80]!r}"
            lines.append(f"{where}.{path}: {text}")
        raise ConfigError("; ".join(lines)) from error


class _Wrapped:
    """Gives a plain implementation class, named by a module path, the face of a declaration."""

    def __init__(self, kind: str, name: str, target: type) -> None:
        self.name = name
        self.api = f"{kind}>={API[kind]}"
        self.caps = CAPS_OF[kind]()
        self.target = target

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """Construct the class with (need, ctx, options), as a declaration's `build` gets them."""
        return self.target(need, ctx, options)


def _load_by_path(candidate: Candidate, place: str, strict: bool) -> Candidate:
    module_name, _, attribute = candidate.value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f'{place}cannot import "{module_name}": {describe(error)}. It was configured '
            "explicitly, so start-up stops"
        ) from error
    target = getattr(module, attribute, None)
    classes = [n for n, v in vars(module).items() if isinstance(v, type) and not n.startswith("_")]
    if not isinstance(target, type):
        raise PluginLoadError(
            f'{place}module "{module_name}" has no class "{attribute}"'
            f"{did_you_mean(attribute, classes)} (classes: {', '.join(classes) or 'none'})"
        )
    if hasattr(target, "build"):
        candidate.name = str(getattr(target, "name", attribute))
        load_declaration(candidate, strict=strict)
        return candidate
    protocol = PROTOCOL_OF.get(candidate.kind)
    wanted = protocol_members(protocol) if protocol is not None else ("build",)
    lacking = [n for n in wanted if callable(getattr(protocol, n, None)) or protocol is None
               if not hasattr(target, n)]  # fmt: skip
    if lacking:
        raise PluginLoadError(
            f"{place}{candidate.value} is neither a declaration (no build) nor a "
            f"{candidate.kind} implementation: it lacks {', '.join(lacking)}"
        )
    candidate.declaration = _Wrapped(candidate.kind, attribute, target)
    candidate.status = "loaded"
    return candidate


def _owner(path: str) -> tuple[str, str]:
    """(distribution, version) that a module belongs to; ("", "") when none does."""
    if path.endswith(".py"):
        return "", ""
    from importlib.metadata import packages_distributions, version

    names = packages_distributions().get(path.split(".")[0], [])
    return (normalize(names[0]), version(names[0])) if names else ("", "")
