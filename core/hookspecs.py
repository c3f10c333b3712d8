"""The hooks: where plugins may propose defaults, check a config, and watch the life of a process.

Hooks are the cold path: choosing, starting, stopping, reporting. None is called inside a step
(a pluggy call costs 2 us against 0.1 us for a method). Work goes through contracts instead.

An implementer writes plain positional parameters without defaults, any subset of a hook's
own, and marks methods with `hookimpl`; the host calls with keywords. Implementations run in the
reverse order of their registration. A hook plugin is an instance of a class, named by an entry
point of group `cardcage.hooks`, and runs only when `plugins.allow` or `plugins.auto` names it.

Source: pluggy 1.6 (its traps were measured; `HookHost` closes them at registration).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pluggy

from cardcage.core.errors import PluginError, PluginLoadError
from cardcage.core.policy import matches

if TYPE_CHECKING:
    from cardcage.core.plan import Plan
    from cardcage.core.registry import Registry

PROJECT = "cardcage"
MAX_HOOKS = 15
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---- what hooks receive and return ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patch:
    """A proposed default: fills `path` (dotted) unless the user set it. `reason` is shown."""

    path: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a config. level: "error" stops the start, "warning" is logged."""

    level: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `cardcage`. `run` gets the arguments after the name, returns an exit code."""

    name: str
    help: str
    run: Callable[[list[str]], int]


@dataclass(frozen=True, slots=True)
class ConfigView:
    """A config to read: `tree` are nested dictionaries (a copy), `is_set` the user's own paths."""

    tree: Mapping[str, Any]
    user_paths: frozenset[str] = frozenset()

    def is_set(self, path: str) -> bool:
        """Whether the user set this dotted path in any source."""
        return path in self.user_paths


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What a process-wide hook may use. role: frontend, core, worker or render."""

    logger: logging.Logger
    config: Mapping[str, Any]
    metrics: Any = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are in place. `dtype` is torch's name."""

    name: str
    ref: str
    revision: str
    architecture: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine that is ready for requests. `explain` is the JSON-able account of choices."""

    model: LoadedModel
    max_model_len: int
    kv_bytes: int
    explain: Mapping[str, Any] = field(default_factory=dict)


# ---- the hooks ---------------------------------------------------------------------------------


class HookSpecs:
    """Every hook, in the order of a run. Methods here are signatures; their bodies never run."""

    @hookspec
    def cardcage_config_defaults(self, draft: ConfigView) -> list[Patch]:  # type: ignore[empty-body]
        """Propose values for config paths that the user left unset.

        When: after files, environment and flags are merged, before the platform's proposals.
        Where: the parent process.
        How often: once per engine.
        Args: draft, the merged config; a copy, changing it does nothing.
        Returns: patches; [] for none. Two plugins that want different values for an unset path
            stop the start with both names.
        Order: does not matter; patches never override each other.
        Errors: an exception stops the start and names the plugin.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_config_check(self, config: ConfigView) -> list[Problem]:  # type: ignore[empty-body]
        """Report what cannot work, or is unwise, in the final config.

        When: after validation, before a model is opened.
        Where: the parent process.
        How often: once per engine.
        Args: config, the final config; read-only.
        Returns: problems; [] for none. Any with level "error" stops the start.
        Order: does not matter; all problems are shown together.
        Errors: an exception stops the start and names the plugin.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_plan_resolved(self, plan: Plan) -> None:
        """Look at the resolved plan of plugins.

        When: after every choice of the parent is made, before children are started.
        Where: the parent process.
        How often: once per engine.
        Args: plan, frozen.
        Returns: nothing; a returned value is refused.
        Order: does not matter.
        Errors: an exception stops the start and names the plugin.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_process_start(self, role: str, ctx: ProcessContext) -> None:
        """Prepare a process of the engine (logging, tracing, an exporter).

        When: first thing in each process, after its plan is verified.
        Where: every process; `role` says which: frontend, core, worker, render.
        How often: once per process; make it idempotent, roles may share a process.
        Args: role; ctx with a logger, the config and a metrics object (None without metrics).
        Returns: nothing.
        Order: does not matter.
        Errors: an exception ends the process with the plugin's name.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_model_loaded(self, info: LoadedModel) -> None:
        """Learn that weights are in place.

        When: after loading, before memory for the cache is taken.
        Where: the process that owns the engine.
        How often: once per engine.
        Args: info, frozen.
        Returns: nothing.
        Order: does not matter.
        Errors: logged with the plugin's name; loading goes on.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_engine_ready(self, info: EngineFacts) -> None:
        """Learn that requests can be served.

        When: after warm-up, before the first request.
        Where: the process that owns the engine.
        How often: once per engine.
        Args: info, frozen.
        Returns: nothing.
        Order: does not matter.
        Errors: logged with the plugin's name; serving goes on.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_engine_stopping(self, reason: str) -> None:
        """Learn that the engine stops, and why.

        When: after the last request ended, before anything is released.
        Where: the process that owns the engine.
        How often: once per engine.
        Args: reason, one sentence.
        Returns: nothing.
        Order: does not matter.
        Errors: logged with the plugin's name; stopping goes on.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_process_stop(self, role: str, ctx: ProcessContext) -> None:
        """Undo what `cardcage_process_start` did.

        When: last thing in each process that ends in order.
        Where: every process.
        How often: at most once per process; not after a crash.
        Args: as for `cardcage_process_start`.
        Returns: nothing.
        Order: does not matter.
        Errors: logged with the plugin's name.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_cli_commands(self) -> list[Command]:  # type: ignore[empty-body]
        """Offer subcommands of `cardcage`.

        When: only if the command line names a subcommand that is not built in.
        Where: the command's process.
        How often: once.
        Args: none.
        Returns: commands; names of built-in commands are refused.
        Order: does not matter; two plugins with one name are an error.
        Errors: an exception ends the command and names the plugin.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_collect_env(self) -> dict[str, Any]:  # type: ignore[empty-body]
        """Add facts to `cardcage collect-env`. No secrets: people paste the output in issues.

        When: on that command.
        Where: the command's process.
        How often: once.
        Args: none.
        Returns: name -> value, shown as text.
        Order: does not matter.
        Errors: shown in place of the facts.
        Since: hooks 1.0.
        """

    @hookspec
    def cardcage_health(self) -> dict[str, Any]:  # type: ignore[empty-body]
        """Say whether the plugin is well.

        When: while serving.
        Where: the process that owns the engine, off the step loop.
        How often: every 5 s; answer within 100 ms.
        Args: none.
        Returns: name -> JSON-able value; {} for nothing to say.
        Order: does not matter.
        Errors: count as unhealthy, with the plugin's name.
        Since: hooks 1.0.
        """


# Element type of list results; dict results; everything else must return None.
_LIST_OF: dict[str, type] = {
    "cardcage_config_defaults": Patch,
    "cardcage_config_check": Problem,
    "cardcage_cli_commands": Command,
}
_DICTS = frozenset({"cardcage_collect_env", "cardcage_health"})
# After these an exception is logged, and the host goes on.
_FORGIVING = frozenset(
    {
        "cardcage_model_loaded",
        "cardcage_engine_ready",
        "cardcage_engine_stopping",
        "cardcage_process_stop",
        "cardcage_collect_env",
        "cardcage_health",
    }
)


def hook_names() -> tuple[str, ...]:
    """The names of all hooks, in the order of a run."""
    return tuple(n for n in vars(HookSpecs) if n.startswith("cardcage_"))


# ---- the host ------------------------------------------------------------------------------------


class HookHost:
    """Registers hook plugins safely and calls them; holds pluggy's manager as `manager`."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(HookSpecs)
        self._log = logging.getLogger("cardcage.hooks")

    def register(self, plugin: object, name: str) -> None:
        """Register an instance under `<kind>.<name>`.

        Raises:
            PluginLoadError: a class, a duplicate name, a property, a hook that does not exist
                (with the nearest spelling), parameters with defaults or keyword-only, or
                parameters that the hook does not have. Nothing stays registered then.
        """
        if inspect.isclass(plugin):
            raise PluginLoadError(f"{name}: register an instance, not the class {plugin!r}")
        if self.manager.has_plugin(name):
            raise PluginLoadError(f"{name}: a plugin of this name is registered already")
        problem = self._problem(plugin)
        if problem:
            raise PluginLoadError(f"{name}: {problem}")
        try:
            self.manager.register(plugin, name)
            self.manager.check_pending()
        except Exception as error:
            # pluggy leaves a plugin half registered when validation fails.
            if self.manager.has_plugin(name):
                self.manager.unregister(name=name)
            raise PluginLoadError(f"{name}: {error}") from error

    def _problem(self, plugin: object) -> str | None:
        for cls in type(plugin).__mro__:
            for attr, value in vars(cls).items():
                if isinstance(value, property) and not attr.startswith("__"):
                    return f"has a property {attr!r}, which registering would run; use a method"
        for attr in dir(type(plugin)):
            function = inspect.getattr_static(plugin, attr)
            options = getattr(function, f"{PROJECT}_impl", None)
            if options is None:
                if attr.startswith(f"{PROJECT}_") and callable(function):
                    return f"method {attr} lacks @hookimpl, so it would never be called"
                continue
            problem = _impl_problem(attr, function, options)
            if problem:
                return problem
        return None

    def activate(self, registry: Registry) -> list[str]:
        """Load and register the hook plugins that the policy names; returns their names.

        Hook plugins are opt-in: installed is not active. `plugins.allow` patterns or
        `plugins.auto` name them. One that fails is reported and skipped.
        """
        policy, names = registry.policy, []
        for candidate in registry.candidates("hooks"):
            named = candidate.dist in policy.auto or any(
                matches(p, "hooks", candidate.name, candidate.dist) for p in policy.allow
            )
            if not named or not candidate.usable:
                continue
            name = f"hooks.{candidate.name}"
            try:
                self.register(registry.load(candidate), name)
            except PluginLoadError as error:
                candidate.refuse("broken", str(error))
                self._log.warning("hook plugin %s is not used: %s", candidate.id, error)
                continue
            names.append(name)
        return names

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook with keywords; the validated results, lists joined into one.

        Raises:
            PluginError: an implementation raised (unless the hook's docstring forgives it), or
                returned something of another type.
        """
        try:
            results = getattr(self.manager.hook, hook)(**arguments)
        except Exception as error:
            text = f"{hook} of {self._culprit(hook, error)} raised {type(error).__name__}: {error}"
            if hook in _FORGIVING:
                self._log.exception(text)
                return [{"error": text}] if hook in _DICTS else []
            raise PluginError(text) from error
        return list(self._checked(hook, results))

    def _checked(self, hook: str, results: Iterable[Any]) -> Iterable[Any]:
        element = _LIST_OF.get(hook)
        for result in results:
            if element is not None:
                if not isinstance(result, list) or not all(isinstance(r, element) for r in result):
                    raise PluginError(f"{hook} must return a list of {element.__name__}, an "
                                      f"implementation returned {result!r}")  # fmt: skip
                yield from result
            elif hook in _DICTS:
                if not isinstance(result, dict):
                    raise PluginError(f"{hook} must return a dict, got {result!r}")
                yield result
            else:
                raise PluginError(f"{hook} must return nothing, got {result!r}")

    def _culprit(self, hook: str, error: Exception) -> str:
        """The plugin whose code is in the traceback."""
        codes = {}
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            codes[getattr(impl.function, "__code__", None)] = impl.plugin_name
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                return str(codes[trace.tb_frame.f_code])
            trace = trace.tb_next
        return "an unknown plugin"


def _impl_problem(attr: str, function: Any, options: Mapping[str, Any]) -> str | None:
    hook = options.get("specname") or attr
    known = hook_names()
    if hook not in known:
        close = get_close_matches(hook, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"there is no hook {hook!r}{hint} (hooks: {', '.join(known)})"
    wanted = list(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.default is not parameter.empty:
            return f"{attr}: parameter {parameter.name!r} has a default and would never be filled"
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return f"{attr}: parameter {parameter.name!r} must be a plain positional one"
        if parameter.name not in wanted:
            return f"{attr}: the hook has no argument {parameter.name!r} (it has {wanted})"
    return None


def active_host(registry: Registry) -> HookHost:
    """A host with the hook plugins that the registry's policy activates."""
    host = HookHost()
    host.activate(registry)
    return host


def plugin_commands() -> list[Command]:
    """The subcommands of active hook plugins, for a command line that names none of ours.

    Raises:
        PluginError: two plugins offer one name, or one takes a built-in's.
    """
    from cardcage.core.cli import COMMANDS
    from cardcage.core.policy import Policy
    from cardcage.core.registry import Registry

    found: list[Command] = active_host(Registry.discover(Policy.configured())).call(
        "cardcage_cli_commands"
    )
    names = [c.name for c in found]
    for name in names:
        if name in COMMANDS:
            raise PluginError(f"a hook plugin offers the command {name!r}, which is built in")
        if names.count(name) > 1:
            raise PluginError(f"two hook plugins offer the command {name!r}")
    return found
