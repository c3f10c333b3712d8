"""The policy: patterns, modes, the environment, pins."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from cardcage.core.errors import ConfigError
from cardcage.core.policy import Policy, matches, normalize, record_digest
from cardcage.core.registry import Registry


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("acme-fa", True),
        ("Acme_FA", True),
        ("acme-*", True),
        ("acme", False),
        ("acme-fa/fa4", True),
        ("acme-fa/fa", False),
        ("acme-fa/attention:*", True),
        ("acme-fa/attention:fa4", True),
        ("acme-fa/linear:fa4", False),
        ("*/attention:fa4", True),
        ("*/fa4", True),
    ],
)
def test_patterns(pattern: str, covered: bool) -> None:
    assert matches(pattern, "attention", "fa4", "acme-fa") is covered


def test_names_are_normalised() -> None:
    assert normalize("Acme__KV.x") == "acme-kv-x"


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Policy(), None),
        (Policy(mode="builtin-only"), "blocked by plugins.mode = builtin-only"),
        (Policy(mode="allow-listed"), "not in plugins.allow (plugins.mode = allow-listed)"),
        (Policy(mode="allow-listed", allow=("acme",)), None),
        (Policy(mode="allow-listed", allow=("acme",), deny=("acme/*:p",)),
         'blocked by plugins.deny "acme/*:p"'),
        (Policy(allow=("other",)), None),  # an allow list binds in its mode only
    ],
)  # fmt: skip
def test_verdicts_for_third_party(policy: Policy, rule: str | None) -> None:
    assert policy.verdict("parsers", "p", "acme") == rule


def test_bundled_plugins_are_allowed_unless_denied() -> None:
    for mode in ("builtin-only", "allow-listed"):
        assert Policy(mode=mode).verdict("attention", "triton_paged", "cardcage") is None
    deny = Policy(deny=("cardcage/attention:triton_paged",))
    assert deny.verdict("attention", "triton_paged", "cardcage") is not None
    assert deny.verdict("attention", "torch_reference", "cardcage") is None


@pytest.mark.parametrize(
    ("text", "acme", "best"),
    [
        ("none", False, False),
        ("", False, False),
        ("all", True, True),
        ("acme", True, False),
        ("acme, best", True, True),
    ],
)
def test_environment_overrides_the_mode(text: str, acme: bool, best: bool) -> None:
    policy = Policy.from_config({"mode": "allow-listed"}, {"CARDCAGE_PLUGINS": text})
    assert (policy.verdict("parsers", "p", "acme") is None) is acme
    assert (policy.verdict("parsers", "p", "best") is None) is best
    rule = policy.verdict("parsers", "p", "best")
    assert rule is None or "CARDCAGE_PLUGINS" in rule


def test_deny_survives_the_environment() -> None:
    policy = Policy.from_config({"deny": ["acme"]}, {"CARDCAGE_PLUGINS": "acme"})
    assert policy.verdict("parsers", "p", "acme") == 'blocked by plugins.deny "acme"'


def test_wrong_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.mode"):
        Policy.from_config({"mode": "some"}, {})
    with pytest.raises(ConfigError, match="sha256"):
        Policy.from_config({"pin": {"acme": "abc"}}, {})
    with pytest.raises(ConfigError, match="nonsense"):
        Policy.from_config({"nonsense": 1}, {})


# ---- pins ---------------------------------------------------------------------------------------


def pinned(site: Any, value: str) -> tuple[str, tuple[str, ...]]:
    found = Registry.discover(Policy(pin={"Acme": value}), [str(site.path)])
    c = next(c for c in found.candidates("parsers") if c.dist == "acme")
    return c.status, c.reasons


def info(site: Any) -> Path:
    return Path(site.path / "acme-1.0.dist-info")


def test_pin_of_the_record(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", record=True)
    good = record_digest((info(site) / "RECORD").read_text())
    assert pinned(site, good) == ("available", ())
    status, reasons = pinned(site, "sha256:" + "0" * 64)
    assert status == "blocked"
    assert good in reasons[0]


def test_pin_notices_a_changed_file(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", record=True)
    good = record_digest((info(site) / "RECORD").read_text())
    (site.path / "acme" / "plugin.py").write_text("changed = True\n")
    status, reasons = pinned(site, good)
    assert status == "blocked"
    assert "acme/plugin.py differs" in reasons[0]
    (site.path / "acme" / "plugin.py").unlink()
    assert "missing" in pinned(site, good)[1][0]


def test_editable_installs_cannot_be_pinned(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", record=True)
    good = record_digest((info(site) / "RECORD").read_text())
    (info(site) / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    assert "editable" in pinned(site, good)[1][0]
    (info(site) / "RECORD").unlink()
    assert "editable" in pinned(site, good)[1][0]


def test_no_pin_no_reading(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()")
    dist = Distribution.at(info(site))
    assert Policy().pin_problem("acme", dist) is None


def test_configured_reads_the_config_only_when_something_could_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARDCAGE_CONFIG_DIR", str(tmp_path))
    assert Policy.configured() == Policy()
    file = tmp_path / "a.toml"
    file.write_text('[plugins]\ndeny = ["acme"]\n')
    assert Policy.configured().deny == ("acme",)
    file.unlink()
    monkeypatch.setenv("CARDCAGE_PLUGINS__DENY", '["best"]')
    assert Policy.configured().deny == ("best",)
