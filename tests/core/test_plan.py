"""The plan: JSON round trip, digest, and verification in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cardcage.core.contracts import HardwareNeed, ParserNeed
from cardcage.core.errors import PlanMismatch
from cardcage.core.plan import Plan, content_digest
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry

ROOT = Path(__file__).resolve().parents[2]


def make(site: Any, **options: Any) -> Plan:
    registry = Registry.discover(Policy(), [str(site.path)])
    decisions = {
        "hardware": registry.resolve("hardware", HardwareNeed(), use="cpu"),
        "parser": registry.resolve("parsers", ParserNeed(), use="acme/p"),
    }
    return Plan.make(decisions, **options)


def acme(site: Any, version: str = "1.0", **options: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", version=version, **options)


def test_round_trip(site: Any) -> None:
    acme(site)
    plan = make(site, options={"parser": {"x": 1}}, env={"A": "b"})
    copy = Plan.from_json(plan.to_json())
    assert copy == plan
    assert copy.digest() == plan.digest()
    slot = next(s for s in copy.slots if s.slot == "parser")
    assert (slot.id, slot.dist_version, slot.target) == ("acme/p", "1.0", "acme.plugin:P")
    assert slot.options == {"x": 1}
    assert "chosen" in slot.summary
    json.loads(plan.to_json())
    copy.verify("child", [str(site.path)])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan_version": 99}', '{"plan_version": 1}'])
def test_not_a_plan(text: str) -> None:
    with pytest.raises(PlanMismatch):
        Plan.from_json(text)


def test_digest_covers_options_and_environment_but_not_places(site: Any, tmp_path: Path) -> None:
    acme(site)
    plan = make(site)
    assert make(site).digest() == plan.digest()
    assert make(site, options={"parser": {"x": 1}}).digest() != plan.digest()
    assert make(site, env={"A": "b"}).digest() != plan.digest()
    data = json.loads(plan.to_json())
    for slot in data["slots"]:
        slot["location"] = "/elsewhere"
    assert Plan.from_json(json.dumps(data)).digest() == plan.digest()


def test_roles(site: Any) -> None:
    site.plugin("acme", "parsers", "p", "ParserCaps()", extra='roles = frozenset({"frontend"})')
    plan = make(site)
    assert {s.slot for s in plan.for_role("frontend")} == {"parser"}
    assert {s.slot for s in plan.for_role("worker")} == {"hardware"}


def test_metrics_of_chosen_plugins_are_declared(site: Any) -> None:
    extra = 'metrics = (MetricDecl("acme_reads", "counter", "reads", ("tier",)),)'
    site.plugin("acme", "parsers", "p", "ParserCaps()", extra=extra)
    plan = make(site)
    assert plan.metrics[0]["name"] == "acme_reads"
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_child_that_sees_another_version(site: Any, tmp_path: Path) -> None:
    acme(site, "1.2")
    plan = make(site)
    other = type(site)(tmp_path / "other")
    acme(other, "1.1")
    with pytest.raises(PlanMismatch) as caught:
        plan.verify("worker rank 3", [str(other.path)])
    assert str(caught.value) == (
        f"worker rank 3 sees acme 1.1 at {other.path}, parent saw 1.2 at {site.path}"
    )


def test_child_that_lost_the_plugin(site: Any, tmp_path: Path) -> None:
    acme(site)
    plan = make(site)
    with pytest.raises(PlanMismatch, match=r"worker rank 1 does not see acme/p \(parsers\)"):
        plan.verify("worker rank 1", [str(tmp_path)])


def test_child_that_sees_another_target(site: Any, tmp_path: Path) -> None:
    acme(site)
    plan = make(site)
    other = type(site)(tmp_path / "other")
    other.add("acme", {"parsers": {"p": "acme.other:P"}}, {"acme/other.py": ""})
    with pytest.raises(PlanMismatch, match=r"acme/p = acme.other:P"):
        plan.verify("child", [str(other.path)])


@pytest.mark.parametrize("record", [True, False])
def test_child_that_sees_other_content(site: Any, tmp_path: Path, record: bool) -> None:
    acme(site, record=record)
    plan = make(site)
    other = type(site)(tmp_path / "other")
    acme(other, record=record, before="changed = True\n")
    with pytest.raises(PlanMismatch, match="sees other content of acme/p"):
        plan.verify("child", [str(other.path)])
    same = type(site)(tmp_path / "same")
    acme(same, record=record)
    plan.verify("child", [str(same.path)])


def test_another_host_version(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acme(site)
    plan = make(site)
    monkeypatch.setattr("cardcage.__version__", "9.9")
    with pytest.raises(PlanMismatch, match=r"child runs cardcage 9\.9, parent runs"):
        plan.verify("child", [str(site.path)])


def test_verification_in_a_spawned_process_imports_no_plugin(site: Any) -> None:
    acme(site)
    text = make(site).to_json()
    code = (
        "import sys; from cardcage.core.plan import Plan\n"
        "from cardcage.core.errors import PlanMismatch\n"
        "plan = Plan.from_json(sys.stdin.read())\n"
        "try: plan.verify('worker rank 3')\n"
        "except PlanMismatch as error: print(error); raise SystemExit(3)\n"
        "print('acme' in sys.modules, 'torch' in sys.modules)"
    )

    def child(*paths: Path) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, paths)])}
        return subprocess.run(
            [sys.executable, "-c", code], input=text, text=True, capture_output=True, env=env,
            check=False,
        )  # fmt: skip

    good = child(site.path)
    assert (good.returncode, good.stdout.strip()) == (0, "False False"), good.stderr
    lost = child()
    assert lost.returncode == 3
    assert "worker rank 3 does not see acme/p" in lost.stdout


def test_module_path_plugins_are_verified_by_content(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.path / "acme_tier.py"
    file.write_text("class Parser:\n    name = 'x'\n    def build(self, *a): pass\n")
    before = content_digest("module-path", "acme_tier:Parser", False)
    file.write_text("changed = True\n")
    assert content_digest("module-path", "acme_tier:Parser", False) != before
