"""Imports one plugin declaration under quarantine and checks it against its contract.

A declaration module is light: the implementation is imported later, by `build`. Any exception
(`SystemExit` too, but not Ctrl-C) of a plugin's import is caught, recorded with its place, and
turned into `PluginLoadError`; it never takes the host down. What an import changes in the process
(environment, signal handlers, logging, ...) is noticed and reported.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from cardcage.core import contracts
from cardcage.core.contracts import API, CAPS_OF, Caps
from cardcage.core.discovery import Candidate
from cardcage.core.errors import PluginLoadError

HEAVY = ("torch", "triton", "transformers", "numpy", "fastapi")
ROLES = frozenset({"frontend", "core", "worker", "render"})
BUDGET_MS = 50.0

# The Protocol that the object returned by `build` must satisfy, where a kind has one.
PROTOCOL_OF: dict[str, type] = {
    "attention": contracts.AttentionBackend,
    "blocks": contracts.BlockPlugin,
    "executors": contracts.Executor,
    "frontends": contracts.Frontend,
    "hardware": contracts.Hardware,
    "kv_kinds": contracts.KVKind,
    "kv_tiers": contracts.KVTier,
    "linear": contracts.LinearKernel,
    "loaders": contracts.Loader,
    "metrics": contracts.MetricsSink,
    "models": contracts.ModelPlugin,
    "quant": contracts.Quantizer,
    "sampling": contracts.LogitsPlugin,
    "speculators": contracts.Speculator,
    "tokenizers": contracts.Tokenizer,
}
# What a declaration itself must offer beside `build`.
DECLARATION_METHODS = {"hardware": ("detect",), "loaders": ("recognise",)}


def load_declaration(candidate: Candidate, *, strict: bool = False) -> Any:
    """Import the module of a candidate, instantiate its class and check it.

    Fills the candidate's status, reasons, warnings, declaration, error and load_ms. With
    `strict`, a side effect of the import is an error instead of a warning.

    Raises:
        PluginLoadError: with the plugin's own exception as `__cause__`.
    """
    started = time.perf_counter()
    before = SideEffects.snapshot(deep=strict or bool(os.environ.get("CARDCAGE_DEBUG")))
    known = set(sys.modules)
    try:
        declaration = _import(candidate)
    except PluginLoadError as error:
        candidate.error = error
        raise
    finally:
        candidate.load_ms = (time.perf_counter() - started) * 1e3
    effects = before.changes()
    heavy = [name for name in HEAVY if name in sys.modules and name not in known]
    notes = [f"misbehaving: {text}" for text in effects]
    notes += [f"imports {name} with its declaration" for name in heavy]
    if effects and strict:
        raise _fail(candidate, "broken", f"{notes[0]} (plugins.strict)")
    candidate.warnings += tuple(notes)
    _check(candidate, declaration)
    candidate.declaration = declaration
    if candidate.status == "available":  # an ambiguous short name stays ambiguous
        candidate.status = "loaded"
    return declaration


def _import(candidate: Candidate) -> Any:
    module_name, _, attribute = candidate.value.partition(":")
    try:
        target: Any = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _fail(candidate, "broken", describe(error), error) from error
    try:
        for part in attribute.split("."):
            target = getattr(target, part)
    except AttributeError as error:
        names = [n for n in vars(target) if isinstance(getattr(target, n), type)]
        hint = f"; classes there: {', '.join(names)}" if names else ""
        text = f"module {module_name} has no {attribute!r}{hint}"
        raise _fail(candidate, "broken", text, error) from error
    if not isinstance(target, type):
        raise _fail(candidate, "broken", f"{candidate.value} is not a class")
    try:
        return target()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _fail(candidate, "broken", describe(error), error) from error


def _fail(
    candidate: Candidate, status: str, reason: str, cause: BaseException | None = None
) -> PluginLoadError:
    candidate.refuse(status, reason)
    error = PluginLoadError(
        f"{candidate.kind} plugin {candidate.id} {candidate.version} ({candidate.value}, in "
        f"{candidate.location}) is {status}: {reason}. To go on without it: "
        f'plugins.deny = ["{candidate.dist}/{candidate.kind}:{candidate.name}"]'
    )
    error.__cause__ = cause
    candidate.error = error
    return error


def describe(error: BaseException) -> str:
    """One sentence for an exception of plugin code, with the last place in a file."""
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r})"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        what = f"ModuleNotFoundError: {error.name}"
    else:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_short(error.filename)}:{error.lineno}"
    else:
        trace = error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if not name.startswith("<") and name not in _OWN_FILES:
                place = f"{_short(name)}:{trace.tb_lineno}"
            trace = trace.tb_next
    return f"{what} (raised in {place})" if place else what


_OWN_FILES = frozenset({__file__, import_module.__code__.co_filename})


def _short(path: str) -> str:
    return "/".join(path.replace(os.sep, "/").split("/")[-2:])


# ---- checks of a loaded declaration -------------------------------------------------------------


def _check(candidate: Candidate, declaration: Any) -> None:
    kind = candidate.kind
    name = getattr(declaration, "name", None)
    if name != candidate.name:
        raise _fail(candidate, "broken", f"its name is {name!r}, the entry point says "
                    f"{candidate.name!r}")  # fmt: skip
    problem, warning = api_problem(kind, getattr(declaration, "api", None), candidate.dist)
    if problem:
        raise _fail(candidate, "incompatible", problem)
    if warning:
        candidate.warnings += (warning,)
    caps = getattr(declaration, "caps", None)
    if not isinstance(caps, CAPS_OF[kind]):
        got = type(caps).__name__
        raise _fail(candidate, "broken", f"caps is {got}, not {CAPS_OF[kind].__name__}")
    needed = ("build", *DECLARATION_METHODS.get(kind, ()))
    for method in needed if kind != "hooks" else ():
        if not callable(getattr(declaration, method, None)):
            raise _fail(candidate, "broken", f"has no method {method}()")
    activation = getattr(declaration, "activation", "available")
    if activation not in ("available", "opt-in"):
        raise _fail(candidate, "broken", f"activation is {activation!r}, not available or opt-in")
    unknown = set(getattr(declaration, "roles", ())) - ROLES
    if unknown:
        raise _fail(candidate, "broken", f"unknown roles {sorted(unknown)}")
    options = getattr(declaration, "options", None)
    if options is not None and not hasattr(options, "model_validate"):
        raise _fail(candidate, "broken", "options is not a pydantic model class")
    if options is not None and options.model_config.get("extra") != "forbid":
        raise _fail(candidate, "broken", 'its options model must set extra="forbid"')
    if not (type(declaration).__doc__ or "").strip():
        candidate.warnings += ("has no docstring",)


def api_problem(
    kind: str, api: str | None, dist: str = "", host: str | None = None
) -> tuple[str | None, str | None]:
    """Compare a declaration's `api` range with the host: (problem, warning), None for none.

    `api` is `kind>=1.0,<2` (a PEP 440 range), or a bare version `1.2`, which means from there
    to the next major. The host keeps the meaning of minors N and N-1, so a range that contains
    either fits. `host` defaults to `contracts.API[kind]`.
    """
    host = API[kind] if host is None else host
    warning = None
    if api is None:
        api, warning = f"{kind}>=1.0,<2", f"declares no api; taken as {kind}>=1.0,<2"
    bare = re.fullmatch(r"(\d+)(\.\d+)*", api)
    if bare is not None:
        api = f"{kind}>={api},<{int(bare[1]) + 1}"
    parts = re.fullmatch(r"\s*([a-z_]+)\s*(.*)", api)
    if parts is None or parts[1] != kind:
        return f"its api {api!r} does not start with {kind!r}", warning
    # The range every bundled plugin uses; answering it here keeps `packaging` unimported.
    if parts[2] == ">=1.0,<2" and host.split(".")[0] == "1":
        return None, warning
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    try:
        wanted = SpecifierSet(parts[2])
    except InvalidSpecifier:
        return f"its api {api!r} is not a PEP 440 range", warning
    major, minor = (int(x) for x in host.split("."))
    if wanted.contains(host) or (minor > 0 and wanted.contains(f"{major}.{minor - 1}")):
        return None, warning
    lowest = [Version(s.version) for s in wanted if s.operator in {">=", ">", "~=", "=="}
              and "*" not in s.version]  # fmt: skip
    newer = any(v > Version(host) for v in lowest)
    fix = "upgrade cardcage" if newer else f"upgrade {dist or 'the plugin'}"
    return f"needs {kind}{wanted}, host has {host}; {fix}", warning


def missing_requirements(caps: Caps) -> list[str]:
    """The entries of `caps.requires` that are not installed, each with its install command."""
    found = []
    for text, command in caps.requires.items():
        problem = _requirement_problem(text)
        if problem:
            found.append(f"{problem} ({command})")
    return found


def _requirement_problem(text: str, depth: int = 0) -> str | None:
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return f"requires {text!r}, which is not a PEP 508 requirement"
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    try:
        dist = distribution(wanted.name)
    except PackageNotFoundError:
        return f"missing: {text}"
    if not wanted.specifier.contains(dist.version, prereleases=True):
        return f"missing: {text} ({dist.version} is installed)"
    if depth == 0:
        for extra in wanted.extras:
            for line in dist.requires or ():
                inner = Requirement(line)
                active = inner.marker is not None and inner.marker.evaluate({"extra": extra})
                if active and not inner.marker.evaluate({"extra": ""}):  # type: ignore[union-attr]
                    inner.marker = None
                    problem = _requirement_problem(str(inner), 1)
                    if problem:
                        return problem
    return None


def protocol_members(protocol: type) -> tuple[str, ...]:
    """The public methods and attributes that a Protocol class asks for."""
    names = dict.fromkeys((*vars(protocol), *getattr(protocol, "__annotations__", {})))
    return tuple(n for n in names if not n.startswith("_"))


def protocol_problem(kind: str, built: Any) -> str | None:
    """What an object lacks of its kind's Protocol, as one sentence; None when it is whole."""
    protocol = PROTOCOL_OF.get(kind)
    if protocol is None:
        return None
    lacking = [n for n in protocol_members(protocol) if not hasattr(built, n)]
    if not lacking:
        return None
    return f"{type(built).__name__} lacks {', '.join(lacking)} of {protocol.__name__}"


# ---- what an import changed in the process ------------------------------------------------------


class _Probe(Protocol):
    def __call__(self) -> Any: ...


def _signals() -> dict[int, Any]:
    return {int(s): signal.getsignal(s) for s in signal.valid_signals()}


def _start_method() -> str | None:
    module = sys.modules.get("multiprocessing")
    return None if module is None else module.get_start_method(allow_none=True)


def _torch(read: Callable[[Any], Any]) -> _Probe:
    def probe() -> Any:
        module = sys.modules.get("torch")
        return None if module is None or not hasattr(module, "cuda") else read(module)

    return probe


_PROBES: dict[str, _Probe] = {
    "changed the root logger's handlers": lambda: [id(h) for h in logging.getLogger().handlers],
    "changed the root logger's level": lambda: logging.getLogger().level,
    "changed a signal handler": _signals,
    "changed the default start method of processes": _start_method,
    "changed sys.path": lambda: list(sys.path),
    "changed sys.meta_path": lambda: [id(f) for f in sys.meta_path],
    "changed the working directory": os.getcwd,
    "changed torch's default dtype": _torch(lambda t: t.get_default_dtype()),
    "changed torch's number of threads": _torch(lambda t: t.get_num_threads()),
    "initialised CUDA": _torch(lambda t: t.cuda.is_initialized()),
}


class SideEffects:
    """What the process looked like before an import; `changes()` compares it with now."""

    def __init__(self, deep: bool) -> None:
        self._env = dict(os.environ)
        self._modules = set(sys.modules)
        self._values = {text: probe() for text, probe in _PROBES.items()}
        self._host = _host_functions() if deep else None

    @classmethod
    def snapshot(cls, deep: bool = False) -> SideEffects:
        """Take the picture. `deep` also watches the functions of the host's own classes."""
        return cls(deep)

    def changes(self) -> list[str]:
        """One phrase per difference, [] when the import left the process alone."""
        found = []
        for name in sorted({*self._env, *os.environ}):
            old, new = self._env.get(name), os.environ.get(name)
            if old != new:
                verb = "set" if old is None else "unset" if new is None else "changed"
                found.append(f"{verb} env {name}")
        gone = sorted(self._modules - set(sys.modules))
        found += [f"removed module {name} from sys.modules" for name in gone]
        for text, probe in _PROBES.items():
            old, new = self._values[text], probe()
            fresh = old is None and text not in ("initialised CUDA",)
            if old != new and not fresh and not (old is None and new is False):
                found.append(text)
        if self._host is not None:
            now = _host_functions()
            found += [
                f"patched {name}" for name, ident in self._host.items()
                if now.get(name) != ident
            ]  # fmt: skip
        return found


def _host_functions() -> dict[str, int]:
    """Identity of every function of the host's modules and their classes."""
    seen: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("cardcage.core") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                for attr, inner in list(vars(value).items()):
                    if callable(inner):
                        seen[f"{name}.{key}.{attr}"] = id(inner)
            elif callable(value) and getattr(value, "__module__", None) == name:
                seen[f"{name}.{key}"] = id(value)
    return seen
