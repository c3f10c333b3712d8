"""The registry: discovery by metadata, quarantine, checks of declarations, building."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cardcage.core.contracts import API, KINDS, AttentionNeed, KVTierNeed, Need, ParserNeed
from cardcage.core.discovery import Candidate
from cardcage.core.errors import (
    ConfigError,
    InvalidRequest,
    PluginLoadError,
    SelectionError,
)
from cardcage.core.loading import api_problem, protocol_members
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry

ROOT = Path(__file__).resolve().parents[2]


def registry(site: Any, policy: Policy | None = None) -> Registry:
    return Registry.discover(policy or Policy(), [str(site.path)])


def one(found: Registry, kind: str, name: str) -> Candidate:
    hits = [c for c in found.candidates(kind) if c.name == name and not c.builtin]
    assert len(hits) == 1
    return hits[0]


def python(code: str, *paths: Path, **env: str) -> str:
    path = os.pathsep.join([str(ROOT), *map(str, paths)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- discovery ----------------------------------------------------------------------------------


def test_bundled_plugins_come_from_pyproject(site: Any) -> None:
    found = registry(site)
    ids = {(c.kind, c.id) for c in found.candidates()}
    assert ("attention", "cardcage/torch_reference") in ids
    assert ("hardware", "cardcage/cpu") in ids
    assert all(c.builtin and c.usable for c in found.candidates())


def test_bundled_plugins_of_an_installed_wheel_come_from_its_metadata(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cardcage.core.discovery.checkout_pyproject", lambda: None)
    assert registry(site).candidates() == []
    value = "cardcage.plugins.hardware.cpu:Cpu"
    site.add("cardcage", {"hardware": {"cpu": value}}, version="7.0")
    found = registry(site).candidates()
    assert [(c.id, c.version, c.builtin) for c in found] == [("cardcage/cpu", "7.0", True)]


def test_third_party_is_listed_with_version_and_place(site: Any) -> None:
    site.plugin("Acme_KV", "kv_tiers", "nvme", "KVTierCaps()", version="3.1")
    c = one(registry(site), "kv_tiers", "nvme")
    assert (c.id, c.version, c.builtin, c.status) == ("acme-kv/nvme", "3.1", False, "available")
    assert c.location == str(site.path)
    assert "Acme_KV" not in sys.modules


def test_distributions_without_our_groups_are_not_parsed(site: Any) -> None:
    site.add("other", {})
    (site.path / "other-1.0.dist-info" / "METADATA").unlink()
    assert all(c.builtin for c in registry(site).candidates())


def test_damaged_metadata_hides_only_its_own_distribution(site: Any) -> None:
    site.plugin("good", "parsers", "good", "ParserCaps()")
    site.add("bad", {"parsers": {"bad": "bad:Bad"}})
    (site.path / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(b"[cardcage.parsers]\n\xff")
    assert [c.name for c in registry(site).candidates("parsers")] == ["good"]


def test_same_distribution_twice_first_wins(site: Any, tmp_path: Path) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", version="1.0")
    second = type(site)(tmp_path / "second")
    second.plugin("acme", "parsers", "p", "ParserCaps()", version="2.0")
    found = Registry.discover(Policy(), [str(site.path), str(second.path)])
    rows = {c.version: c for c in found.candidates("parsers")}
    assert rows["1.0"].status == "available"
    assert rows["2.0"].status == "shadowed"
    assert str(site.path) in rows["2.0"].reasons[0]
    decision = found.resolve("parsers", ParserNeed(), use="p")
    assert decision.chosen is rows["1.0"]


def test_first_distribution_without_plugins_still_shadows(site: Any, tmp_path: Path) -> None:
    site.add("acme", {}, version="2.0")
    second = type(site)(tmp_path / "second")
    second.plugin("acme", "parsers", "p", "ParserCaps()", version="1.0")
    found = Registry.discover(Policy(), [str(site.path), str(second.path)])
    assert [c.status for c in found.candidates("parsers")] == ["shadowed"]


@pytest.mark.parametrize(
    ("kind", "name", "value", "status", "text"),
    [
        ("paint", "p", "m:P", "unknown-kind", "newer host"),
        ("parsers", "Bad Name", "m:P", "broken", "must match"),
        ("parsers", "p", "justmodule", "broken", "not module:Class"),
    ],
)
def test_malformed_entries_are_reported(
    site: Any, kind: str, name: str, value: str, status: str, text: str
) -> None:
    site.add("acme", {kind: {name: value}})
    c = next(c for c in registry(site).candidates() if not c.builtin)
    assert c.status == status
    assert text in c.reasons[0]


def test_entry_declared_twice_by_one_distribution(site: Any) -> None:
    site.add("acme", {})
    info = site.path / "acme-1.0.dist-info" / "entry_points.txt"
    info.write_text("[cardcage.parsers]\np = a:P\np = b:P\n")
    statuses = sorted(c.status for c in registry(site).candidates("parsers"))
    assert statuses == ["available", "shadowed"]


def test_requirement_on_a_newer_host_is_known_without_import(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", requires=["Cardcage>=99"])
    c = one(registry(site), "parsers", "p")
    assert c.status == "incompatible"
    assert "needs cardcage>=99" in c.reasons[0]
    assert "acme.plugin" not in sys.modules


def test_requirement_with_a_false_marker_does_not_count(site: Any) -> None:
    site.plugin(
        "acme", "parsers", "p", "ParserCaps()", requires=["cardcage>=99; python_version < '3'"]
    )
    assert one(registry(site), "parsers", "p").usable


def test_plugin_installed_while_running_is_not_seen(site: Any) -> None:
    found = registry(site)
    site.plugin("late", "parsers", "late", "ParserCaps()")
    assert found.candidates("parsers") == []
    with pytest.raises(SelectionError, match="unknown"):
        found.resolve("parsers", ParserNeed(), use="late")


def test_two_hundred_distributions_are_listed_quickly(tmp_path: Path, site: Any) -> None:
    for i in range(200):
        site.add(f"dist{i}", {"parsers": {f"p{i}": f"m{i}:P"}} if i % 2 else {})
    best = min(_timed(lambda: registry(site)) for _ in range(3))
    assert len(registry(site).candidates("parsers")) == 100
    assert best < 0.150


def _timed(work: Any) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def test_listing_imports_no_plugin_and_nothing_heavy(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", before="raise SystemExit(9)")
    code = (
        "import sys, json; from cardcage.core.cli import main; code = main(['plugins'])\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'fastapi', 'triton', 'transformers', 'acme'}\n"
        "loaded = [m for m in sys.modules if m in heavy or m.startswith('cardcage.plugins')]\n"
        "print(json.dumps([code, loaded]))"
    )
    last = python(code, site.path).splitlines()[-1]
    assert json.loads(last) == [0, []]


# ---- names --------------------------------------------------------------------------------------


def test_name_conflict_is_an_error_only_when_the_short_name_is_needed(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    site.plugin("best", "parsers", "p", "ParserCaps()")
    found = registry(site)
    assert {c.status for c in found.candidates("parsers")} == {"ambiguous"}
    assert any("ambiguous" in text and "best/p" in text for text in found.warnings())
    with pytest.raises(SelectionError, match=r"acme/p and best/p .*plugins\.prefer"):
        found.resolve("parsers", ParserNeed(), use="p")
    decision = found.resolve("parsers", ParserNeed(), use="best/p")
    assert decision.chosen is not None
    assert decision.chosen.id == "best/p"
    with pytest.raises(SelectionError, match="ambiguous"):  # loading one does not settle it
        found.resolve("parsers", ParserNeed(), use="p")


@pytest.mark.parametrize("form", ["best/p", "best/parsers:p"])
def test_prefer_settles_a_conflict(site: Any, form: str) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    site.plugin("best", "parsers", "p", "ParserCaps()")
    found = registry(site, Policy(prefer=(form,)))
    decision = found.resolve("parsers", ParserNeed(), use="p")
    assert decision.chosen is not None
    assert decision.chosen.dist == "best"


def test_names_of_bundled_plugins_are_reserved(site: Any) -> None:
    site.plugin("acme", "hardware", "cpu", 'HardwareCaps(device_type="cpu")')
    found = registry(site)
    foreign = one(found, "hardware", "cpu")
    assert foreign.status == "ambiguous"
    from cardcage.core.contracts import HardwareNeed

    decision = found.resolve("hardware", HardwareNeed(), use="cpu")
    assert decision.chosen is not None
    assert decision.chosen.builtin


def test_unknown_kind_names_the_nearest(site: Any) -> None:
    with pytest.raises(SelectionError, match='did you mean "attention"'):
        registry(site).candidates("atention")


# ---- quarantine ---------------------------------------------------------------------------------


def test_broken_entry_point_beside_a_good_one(site: Any) -> None:
    site.plugin("good", "parsers", "good", "ParserCaps()")
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="import liburing_missing")
    found = registry(site)
    bad = one(found, "parsers", "bad")
    with pytest.raises(PluginLoadError, match="liburing_missing") as caught:
        found.load(bad)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.__traceback__ is not None
    assert bad.status == "broken"
    assert "bad/plugin.py:1" in bad.reasons[0]
    assert bad.load_ms is not None
    assert found.load(one(found, "parsers", "good")).name == "good"
    assert any("bad" in text for text in found.warnings())
    with pytest.raises(PluginLoadError, match="liburing_missing"):  # remembered, not retried
        found.load(bad)


def test_exit_at_import_is_caught(site: Any) -> None:
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="import sys; sys.exit(3)")
    found = registry(site)
    with pytest.raises(PluginLoadError, match=r"called sys.exit\(3\)"):
        found.load(one(found, "parsers", "bad"))


def test_no_kind_of_exception_of_an_import_takes_the_host_down(site: Any) -> None:
    site.plugin(
        "bad",
        "parsers",
        "bad",
        "ParserCaps()",
        before="class Odd(BaseException): pass\nraise Odd('x')",
    )
    found = registry(site)
    with pytest.raises(PluginLoadError, match=r"Odd: x"):
        found.load(one(found, "parsers", "bad"))


def test_interrupt_at_import_is_not_caught(site: Any) -> None:
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="raise KeyboardInterrupt")
    found = registry(site)
    with pytest.raises(KeyboardInterrupt):
        found.load(one(found, "parsers", "bad"))


def test_syntax_error_names_file_and_line(site: Any) -> None:
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="\n\nx = = 1\n")
    found = registry(site)
    with pytest.raises(PluginLoadError, match=r"bad/plugin.py:3"):
        found.load(one(found, "parsers", "bad"))


def test_required_plugin_that_is_broken_stops_with_the_table(site: Any) -> None:
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="1 / 0")
    with pytest.raises(SelectionError) as caught:
        registry(site).resolve("parsers", ParserNeed(), use="bad")
    assert "ZeroDivisionError" in str(caught.value)
    assert "bad/bad" in caught.value.table
    assert isinstance(caught.value.__cause__, PluginLoadError)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class Other: pass", "has no 'P'; classes there: Other"),
        ("def P(): pass", "not a class"),
        ("class P:\n    def __init__(self): raise RuntimeError('boom')", "RuntimeError: boom"),
        ("class P:\n    name = 'q'", "its name is 'q', the entry point says 'p'"),
        ("class P:\n    name = 'p'", "caps is NoneType, not ParserCaps"),
        (
            "from cardcage.core.contracts import *\n"
            "class P:\n    name = 'p'; caps = GrammarCaps()\n    def build(self, *a): pass",
            "caps is GrammarCaps, not ParserCaps",
        ),
        (
            "from cardcage.core.contracts import *\nclass P:\n    name = 'p'; caps = ParserCaps()",
            "has no method build",
        ),
        (
            "from cardcage.core.contracts import *\n"
            "class P:\n    name = 'p'; caps = ParserCaps(); activation = 'always'\n"
            "    def build(self, *a): pass",
            "activation is 'always'",
        ),
        (
            "from cardcage.core.contracts import *\n"
            "class P:\n    name = 'p'; caps = ParserCaps(); roles = {'boss'}\n"
            "    def build(self, *a): pass",
            "unknown roles",
        ),
        (
            "from cardcage.core.contracts import *\nfrom pydantic import BaseModel\n"
            "class P:\n    name = 'p'; caps = ParserCaps(); options = BaseModel\n"
            "    def build(self, *a): pass",
            'must set extra="forbid"',
        ),
        (
            "from cardcage.core.contracts import *\n"
            "class P:\n    name = 'p'; caps = ParserCaps(); options = dict\n"
            "    def build(self, *a): pass",
            "not a pydantic model",
        ),
    ],
)
def test_malformed_declarations(site: Any, source: str, text: str) -> None:
    site.add("acme", {"parsers": {"p": "acme_one:P"}}, {"acme_one.py": source})
    found = registry(site)
    with pytest.raises(PluginLoadError) as caught:
        found.load(one(found, "parsers", "p"))
    assert text in str(caught.value)


def test_loaders_and_hardware_need_their_own_methods(site: Any) -> None:
    site.plugin("acme", "loaders", "tape", "LoaderCaps()")
    found = registry(site)
    with pytest.raises(PluginLoadError, match="has no method recognise"):
        found.load(one(found, "loaders", "tape"))


# ---- policy -------------------------------------------------------------------------------------


def test_denied_plugin_is_never_imported(site: Any, tmp_path: Path) -> None:
    flag = tmp_path / "imported"
    before = f"open({str(flag)!r}, 'w').close()\n"
    site.plugin("evil", "parsers", "evil", "ParserCaps()", before=before)
    found = registry(site, Policy(deny=("evil",)))
    c = one(found, "parsers", "evil")
    assert c.status == "blocked"
    assert c.reasons == ('blocked by plugins.deny "evil"',)
    with pytest.raises(PluginLoadError, match="blocked"):
        found.load(c)
    for use in ("auto", "evil", "evil/evil"):
        with pytest.raises(SelectionError, match=r"plugins\.deny"):
            found.resolve("parsers", ParserNeed(), use=use)
    assert not flag.exists()
    registry(site).load(one(registry(site), "parsers", "evil"))
    assert flag.exists()


def test_environment_stops_third_party_plugins(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    monkeypatch.setenv("CARDCAGE_PLUGINS", "none")
    found = Registry.discover(search_path=[str(site.path)])
    assert one(found, "parsers", "p").status == "blocked"


# ---- versions and requirements ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "host", "problem"),
    [
        ("attention>=1.0,<2", "1.3", None),
        ("attention>=1.3,<2", "1.3", None),
        ("attention>=1.0,<1.3", "1.3", None),  # minor N-1 is still served
        ("attention>=1.0,<1.2", "1.3", "upgrade acme"),
        ("attention>=1.4", "1.3", "upgrade cardcage"),
        ("attention>=2", "1.3", "needs attention>=2, host has 1.3"),
        ("attention==1.2", "1.3", None),
        ("attention>=1.0,<2", "2.0", "upgrade acme"),
        ("1.0", "1.3", None),
        ("2.0", "1.3", "upgrade cardcage"),
        ("linear>=1.0", "1.3", "does not start with 'attention'"),
        ("attention one", "1.3", "not a PEP 440 range"),
    ],
)
def test_api_ranges(api: str, host: str, problem: str | None) -> None:
    found, warning = api_problem("attention", api, "acme", host)
    assert warning is None
    assert (found is None) if problem is None else (problem in (found or ""))


def test_absent_api_is_taken_as_one_with_a_warning() -> None:
    assert api_problem("attention", None, "acme", "1.3")[0] is None
    assert "declares no api" in (api_problem("attention", None, "acme", "1.3")[1] or "")
    assert "upgrade acme" in (api_problem("attention", None, "acme", "2.0")[0] or "")


def test_incompatible_api_is_a_status_and_not_a_crash(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", extra='api = "parsers>=7"')
    found = registry(site)
    decision = found.explain("parsers", ParserNeed())
    assert decision.chosen is None
    assert [r.status for r in decision.rows] == ["incompatible"]
    assert "needs parsers>=7" in decision.table()


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ({"no-such-dist-here>=1": "pip install x"}, "missing: no-such-dist-here>=1"),
        ({"pytest>=9999": "pip install -U pytest"}, "is installed) (pip install -U pytest)"),
        ({"pytest>=1": "pip install pytest"}, None),
        ({"no-such-dist-here; python_version < '3'": "-"}, None),
        ({"not a requirement": "-"}, "not a PEP 508 requirement"),
    ],
)
def test_requirements_are_looked_up_in_metadata(
    site: Any, requires: dict[str, str], reason: str | None
) -> None:
    site.plugin("acme", "parsers", "p", f"ParserCaps(requires={requires!r})")
    decision = registry(site).explain("parsers", ParserNeed())
    row = decision.rows[0]
    assert row.status == ("chosen" if reason is None else "missing-requirement")
    assert reason is None or reason in row.text()


def test_requirement_with_an_extra_checks_the_extra(site: Any) -> None:
    site.add("base-dist", {}, requires=["no-such-thing>=2; extra == 'fast'"])
    caps = "ParserCaps(requires={'base-dist[fast]': 'pip install base-dist[fast]'})"
    site.plugin("acme", "parsers", "p", caps)
    row = registry(site).explain("parsers", ParserNeed()).rows[0]
    assert row.status == "missing-requirement"
    assert "no-such-thing" in row.text()


# ---- side effects -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("import os; os.environ['ACME_SIDE'] = '1'\n", "set env ACME_SIDE"),
        ("import logging; logging.getLogger().addHandler(logging.NullHandler())\n", "root logger"),
        ("import sys; sys.path.append('/nowhere')\n", "sys.path"),
        ("import sys; sys.modules.pop('this_is_dropped')\n", "removed module this_is_dropped"),
        ("import signal; signal.signal(signal.SIGUSR2, lambda *a: None)\n", "signal handler"),
    ],
)
def test_side_effects_of_an_import_are_reported(
    site: Any, monkeypatch: pytest.MonkeyPatch, before: str, text: str
) -> None:
    import signal

    old = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ACME_SIDE", "0")
    monkeypatch.delenv("ACME_SIDE")
    monkeypatch.setitem(sys.modules, "this_is_dropped", logging)
    site.plugin("acme", "parsers", "p", "ParserCaps()", before=before)
    found = registry(site)
    c = one(found, "parsers", "p")
    try:
        found.load(c)
        assert any(w.startswith("misbehaving") and text in w for w in c.warnings)
        sys.modules.pop("acme.plugin")
        monkeypatch.delenv("ACME_SIDE", raising=False)
        monkeypatch.setitem(sys.modules, "this_is_dropped", logging)
        strict = registry(site, Policy(strict=True))
        if "signal" not in text:  # the handler is already the plugin's, a new one each time
            with pytest.raises(PluginLoadError, match="misbehaving"):
                strict.load(one(strict, "parsers", "p"))
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_patching_the_host_is_noticed_under_strict(site: Any) -> None:
    before = (
        "import cardcage.core.policy as policy\n"
        "original = policy.Policy.verdict\n"
        "policy.Policy.verdict = lambda self, *a: None\n"
    )
    from cardcage.core import policy

    original = policy.Policy.verdict
    site.plugin("acme", "parsers", "p", "ParserCaps()", before=before)
    strict = registry(site, Policy(strict=True))
    try:
        with pytest.raises(PluginLoadError, match=r"patched cardcage.core.policy.Policy.verdict"):
            strict.load(one(strict, "parsers", "p"))
    finally:
        policy.Policy.verdict = original  # type: ignore[method-assign]


def test_heavy_imports_of_a_declaration_are_noted(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", before="import numpy\n")
    code = (
        "from cardcage.core.registry import Registry\n"
        "r = Registry.discover(); c = r.candidates('parsers')[0]; r.load(c); print(c.warnings)"
    )
    assert "imports numpy with its declaration" in python(code, site.path)


# ---- module_path --------------------------------------------------------------------------------

TIER = """
from cardcage.core.contracts import KVTierCaps

class Nvme:
    def __init__(self, need, ctx, options):
        self.got = (need, ctx, options)
        if options and options.get("fail"): raise OSError("disk is full")
    def probe(self, keys): ...
    def read(self, keys, dst, deadline_s): ...
    def write(self, keys, src, deadline_s): ...
    def poll(self): return []
    def drop(self, keys): ...
    def stats(self): return {}
    def drain(self, deadline_s): ...
    def close(self): ...

class Declared:
    "A tier."
    name = "declared"; api = "kv_tiers>=1.0,<2"; caps = KVTierCaps(medium="nvme")
    def build(self, need, ctx, options): return Nvme(need, ctx, options)

class Wrong: pass

class Explodes(Nvme):
    def __init__(self, *a): raise OSError("disk is full")
"""


@pytest.mark.parametrize(
    ("path", "name"),
    [("acme_tier", "Nvme"), ("acme_tier:Nvme", None), ("acme_tier", "Declared")],
)
def test_module_path(site: Any, path: str, name: str | None) -> None:
    (site.path / "acme_tier.py").write_text(TIER)
    found = registry(site)
    c = found.from_module_path("kv_tiers", path, name, where="kv.tiers[1]")
    built = found.build(c, KVTierNeed(bytes=5), "ctx")
    assert built.got == (KVTierNeed(bytes=5), "ctx", None)


@pytest.mark.parametrize(
    ("path", "name", "text"),
    [
        ("acme_tier", "Nvmee", r'kv.tiers\[1\]: .*has no class "Nvmee"; did you mean "Nvme"'),
        ("acme_tierr", "Nvme", r'kv.tiers\[1\]: cannot import "acme_tierr": .*explicitly'),
        ("acme_tier", "Wrong", r"neither a declaration .* lacks probe, read"),
        ("acme_tier", None, "needs a type"),
        ("/abs/tier.py", "Nvme", r"plugins\.allow_files"),
    ],
)
def test_module_path_errors(site: Any, path: str, name: str | None, text: str) -> None:
    (site.path / "acme_tier.py").write_text(TIER)
    with pytest.raises(PluginLoadError, match=text):
        registry(site).from_module_path("kv_tiers", path, name, where="kv.tiers[1]")


def test_module_path_constructor_that_raises(site: Any) -> None:
    (site.path / "acme_tier.py").write_text(TIER)
    found = registry(site)
    c = found.from_module_path("kv_tiers", "acme_tier", "Explodes")
    with pytest.raises(PluginLoadError, match="OSError: disk is full") as caught:
        found.build(c, KVTierNeed(), None)
    assert isinstance(caught.value.__cause__, OSError)


def test_module_path_to_a_file_only_when_allowed(site: Any, tmp_path: Path) -> None:
    file = tmp_path / "tier.py"
    file.write_text(TIER)
    found = registry(site, Policy(allow_files=True))
    c = found.from_module_path("kv_tiers", f"{file}:Nvme")
    assert found.build(c, KVTierNeed(), None).poll() == []


def test_module_path_is_subject_to_deny(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    (site.path / "acme-1.0.dist-info" / "top_level.txt").write_text("acme\n")
    found = registry(site, Policy(deny=("acme",)))
    with pytest.raises(PluginLoadError, match="belongs to acme"):
        found.from_module_path("parsers", "acme.plugin", "P")
    assert "acme" not in sys.modules


# ---- options and building -----------------------------------------------------------------------

OPTIONS = """
from pydantic import BaseModel, ConfigDict, Field
class Opts(BaseModel):
    model_config = ConfigDict(extra="forbid")
    num_splits: int = Field(4, ge=1, le=64)
"""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_split": 8}, 'plugin."acme/p".num_split: unknown option; did you mean "num_splits"?'),
        ({"num_splits": 99}, 'plugin."acme/p".num_splits: Input should be less than or equal'),
        ({"num_splits": "x"}, "got 'x'"),
    ],
)
def test_option_errors_name_the_config_path(site: Any, options: dict[str, Any], text: str) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", extra="options = Opts", before=OPTIONS)
    found = registry(site)
    with pytest.raises(ConfigError) as caught:
        found.build(one(found, "parsers", "p"), ParserNeed(), None, options)
    assert text in str(caught.value)


def test_options_of_a_plugin_that_takes_none(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    found = registry(site)
    with pytest.raises(ConfigError, match=r'plugin."acme/p": this plugin takes no options'):
        found.build(one(found, "parsers", "p"), ParserNeed(), None, {"x": 1})


def test_options_reach_build_as_a_model(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", extra="options = Opts", before=OPTIONS)
    source = (site.path / "acme" / "plugin.py").read_text()
    source = source.replace("return self", "return options")
    (site.path / "acme" / "plugin.py").write_text(source)
    found = registry(site)
    built = found.build(one(found, "parsers", "p"), ParserNeed(), None, {"num_splits": 7})
    assert built.num_splits == 7


def test_errors_of_our_tree_pass_through_build_unchanged(site: Any) -> None:
    before = "from cardcage.core.errors import InvalidRequest\n"
    site.plugin("acme", "parsers", "p", "ParserCaps()", before=before)
    source = (site.path / "acme" / "plugin.py").read_text()
    source = source.replace("return self", "raise InvalidRequest('no')")
    (site.path / "acme" / "plugin.py").write_text(source)
    found = registry(site)
    with pytest.raises(InvalidRequest, match="no"):
        found.build(one(found, "parsers", "p"), ParserNeed(), None)


def test_what_build_returns_is_checked_against_the_protocol(site: Any) -> None:
    site.plugin("acme", "attention", "half", "AttentionCaps()")
    found = registry(site)
    with pytest.raises(PluginLoadError, match="lacks kv_parts, plan, write, forward"):
        found.build(one(found, "attention", "half"), AttentionNeed(), None)


def test_options_for_takes_the_most_exact_key(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    found = registry(site)
    c = one(found, "parsers", "p")
    assert found.options_for(c, {"p": {"a": 1}}) is None  # a bare name means a bundled plugin
    assert found.options_for(c, {"acme/p": {"a": 1}}) == {"a": 1}
    both = {"acme/p": {"a": 1}, "acme/parsers:p": {"a": 2}}
    assert found.options_for(c, both) == {"a": 2}
    cpu = next(c for c in found.candidates("hardware") if c.name == "cpu")
    assert found.options_for(cpu, {"cpu": {"b": 1}}) == {"b": 1}


def test_options_of_plugins_that_are_not_installed_are_warned_about(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    found = registry(site)
    table = {"acme/p": {}, "acme/parsers:p": {}, "cpu": {}, "acme/pp": {}}
    warnings = found.table_warnings(table)
    assert len(warnings) == 1
    assert 'did you mean "acme/p"' in warnings[0]


def test_building_without_a_winner_is_refused(site: Any) -> None:
    found = registry(site)
    with pytest.raises(SelectionError):
        found.build(found.explain("parsers", ParserNeed()), ParserNeed(), None)


def test_summary_line(site: Any) -> None:
    site.plugin("acme", "kv_tiers", "nvme", "KVTierCaps()", version="1.2")
    text = registry(site).summary_line()
    assert "1 third-party (acme 1.2: kv_tiers/nvme)" in text


# ---- the contracts page -------------------------------------------------------------------------


def test_every_kind_has_caps_and_need_with_the_same_fields() -> None:
    from dataclasses import fields

    from cardcage.core.contracts import CAPS_OF, Caps
    from cardcage.core.resolver import need_class

    assert set(CAPS_OF) == set(KINDS) == set(API)
    base = {f.name for f in fields(Caps)}
    for kind, caps in CAPS_OF.items():
        need = need_class(kind)
        assert issubclass(need, Need)
        compared = {f.name for f in fields(need)} & ({f.name for f in fields(caps)} - base)
        assert compared or not fields(need) or kind == "frontends", kind


def test_protocol_members_are_public_names() -> None:
    from cardcage.core.contracts import LinearKernel

    assert set(protocol_members(LinearKernel)) == {"layout_id", "prepare", "run"}
