"""Hooks: documentation, safe registration, activation, results and their errors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cardcage.core import hookspecs as h
from cardcage.core.errors import PluginError, PluginLoadError
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry

SECTIONS = ("When:", "Where:", "How often:", "Args:", "Returns:", "Order:", "Errors:", "Since:")


@pytest.mark.parametrize("name", h.hook_names())
def test_every_hook_is_documented_and_typed(name: str) -> None:
    spec = getattr(h.HookSpecs, name)
    doc = inspect.getdoc(spec) or ""
    places = [doc.find(section) for section in SECTIONS]
    assert all(place > 0 for place in places), name
    assert places == sorted(places), name
    signature = inspect.signature(spec)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in list(signature.parameters.values())[1:]:
        assert parameter.annotation is not parameter.empty
        assert parameter.default is parameter.empty


def test_there_are_at_most_fifteen() -> None:
    assert 0 < len(h.hook_names()) <= h.MAX_HOOKS


def register(plugin: object, name: str = "hooks.x") -> h.HookHost:
    host = h.HookHost()
    host.register(plugin, name)
    return host


class Good:
    @h.hookimpl
    def cardcage_config_defaults(self) -> list[h.Patch]:  # fewer arguments than the spec
        return [h.Patch("kv.block_size", 64, "good: because")]

    @h.hookimpl
    def cardcage_engine_stopping(self, reason: str) -> None:
        self.seen = reason

    @h.hookimpl
    def cardcage_collect_env(self) -> dict[str, Any]:
        return {"good": 1}


def test_good_plugin() -> None:
    plugin = Good()
    host = register(plugin)
    assert host.call("cardcage_config_defaults", draft=h.ConfigView({})) == [
        h.Patch("kv.block_size", 64, "good: because")
    ]
    assert host.call("cardcage_engine_stopping", reason="done") == []
    assert plugin.seen == "done"
    assert host.call("cardcage_collect_env") == [{"good": 1}]


class Misspelt:
    @h.hookimpl
    def cardcage_engine_redy(self, info: Any) -> None: ...


class Default:
    @h.hookimpl
    def cardcage_engine_stopping(self, reason: str = "none") -> None: ...


class KeywordOnly:
    @h.hookimpl
    def cardcage_engine_stopping(self, *, reason: str) -> None: ...


class Extra:
    @h.hookimpl
    def cardcage_engine_stopping(self, reason: str, colour: str) -> None: ...


class Property:
    @property
    def cardcage_thing(self) -> int:
        raise RuntimeError("must never run")


class Unmarked:
    def cardcage_engine_stopping(self, reason: str) -> None: ...


class WrongSpecname:
    @h.hookimpl(specname="cardcage_engine_stoping")
    def other(self, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (Misspelt(), "did you mean 'cardcage_engine_ready'"),
        (WrongSpecname(), "did you mean 'cardcage_engine_stopping'"),
        (Default(), "has a default and would never be filled"),
        (KeywordOnly(), "must be a plain positional"),
        (Extra(), "has no argument 'colour'"),
        (Property(), "has a property 'cardcage_thing'"),
        (Unmarked(), "lacks @hookimpl"),
        (Good, "register an instance"),
    ],
)
def test_traps_are_closed_and_nothing_stays_registered(plugin: Any, text: str) -> None:
    host = h.HookHost()
    with pytest.raises(PluginLoadError, match=text):
        host.register(plugin, "hooks.x")
    assert not host.manager.has_plugin("hooks.x")
    assert not host.manager.get_plugins()


def test_a_failure_inside_pluggy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    host = h.HookHost()

    def boom() -> None:
        raise RuntimeError("pending")

    monkeypatch.setattr(host.manager, "check_pending", boom)
    with pytest.raises(PluginLoadError, match="pending"):
        host.register(Good(), "hooks.x")
    assert not host.manager.get_plugins()


def test_duplicate_names() -> None:
    host = register(Good())
    with pytest.raises(PluginLoadError, match="registered already"):
        host.register(Good(), "hooks.x")
    assert host.manager.has_plugin("hooks.x")


class Raises:
    @h.hookimpl
    def cardcage_config_check(self, config: Any) -> list[h.Problem]:
        raise ValueError("boom")

    @h.hookimpl
    def cardcage_health(self) -> dict[str, Any]:
        raise ValueError("sick")

    @h.hookimpl
    def cardcage_engine_ready(self, info: Any) -> None:
        raise ValueError("late")


def test_errors_name_the_plugin() -> None:
    host = register(Good(), "hooks.good")
    host.register(Raises(), "hooks.raises")
    with pytest.raises(PluginError, match=r"cardcage_config_check of hooks\.raises raised Value"):
        host.call("cardcage_config_check", config=h.ConfigView({}))


def test_observers_never_stop_the_host(caplog: pytest.LogCaptureFixture) -> None:
    host = register(Raises(), "hooks.raises")
    assert host.call("cardcage_engine_ready", info=None) == []
    assert "hooks.raises" in caplog.text
    assert "sick" in host.call("cardcage_health")[0]["error"]


class WrongResults:
    @h.hookimpl
    def cardcage_config_defaults(self) -> Any:
        return ["kv.block_size"]

    @h.hookimpl
    def cardcage_collect_env(self) -> Any:
        return "text"

    @h.hookimpl
    def cardcage_process_start(self) -> Any:
        return 3


@pytest.mark.parametrize(
    ("hook", "arguments", "text"),
    [
        ("cardcage_config_defaults", {"draft": None}, "list of Patch"),
        ("cardcage_collect_env", {}, "must return a dict"),
        ("cardcage_process_start", {"role": "core", "ctx": None}, "must return nothing"),
    ],
)
def test_results_are_checked(hook: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PluginError, match=text):
        register(WrongResults()).call(hook, **arguments)


# ---- activation through the registry ------------------------------------------------------------

HOOK = """
from cardcage.core.contracts import HookCaps
from cardcage.core.hookspecs import hookimpl, Command

class Tracer:
    "A hook plugin."
    name = "tracer"; api = "hooks>=1.0,<2"; caps = HookCaps()

    @hookimpl
    def cardcage_cli_commands(self):
        return [Command("trace", "trace it", lambda argv: print("traced", argv) or 7)]

    @hookimpl
    def cardcage_collect_env(self):
        return {"tracer": "on"}
"""


@pytest.fixture
def tracer(site: Any) -> Any:
    return site.add("acme", {"hooks": {"tracer": "acme_trace:Tracer"}}, {"acme_trace.py": HOOK})


def discover(site: Any, **policy: Any) -> Registry:
    return Registry.discover(Policy(**policy), [str(site.path)])


def test_installed_is_not_active(tracer: Any) -> None:
    host = h.HookHost()
    assert host.activate(discover(tracer)) == []
    assert host.call("cardcage_collect_env") == []


@pytest.mark.parametrize(
    "policy",
    [{"allow": ("acme",)}, {"allow": ("acme/hooks:tracer",)}, {"auto": ("acme",)}],
)
def test_named_is_active(tracer: Any, policy: dict[str, Any]) -> None:
    host = h.HookHost()
    assert host.activate(discover(tracer, **policy)) == ["hooks.tracer"]
    assert host.call("cardcage_collect_env") == [{"tracer": "on"}]


def test_denied_stays_denied(tracer: Any) -> None:
    host = h.HookHost()
    assert host.activate(discover(tracer, allow=("acme",), deny=("acme",))) == []


def test_broken_hook_plugin_is_skipped_and_reported(site: Any) -> None:
    source = HOOK.replace("def cardcage_collect_env(self)", "def cardcage_colect_env(self)")
    site.add("acme", {"hooks": {"tracer": "acme_bad:Tracer"}}, {"acme_bad.py": source})
    registry = discover(site, allow=("acme",))
    assert h.HookHost().activate(registry) == []
    assert "cardcage_collect_env" in registry.candidates("hooks")[0].reasons[0]


def test_hooks_are_not_called_by_direct_calls(tracer: Any) -> None:
    """Monitoring pluggy shows that only `call` reaches hooks."""
    host = h.HookHost()
    host.activate(discover(tracer, allow=("acme",)))
    calls: list[str] = []
    undo = host.manager.add_hookcall_monitoring(
        lambda name, impls, kwargs: calls.append(name), lambda *a: None
    )
    host.call("cardcage_collect_env")
    undo()
    assert calls == ["cardcage_collect_env"]
