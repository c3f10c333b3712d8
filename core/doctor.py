"""`cardcage plugins doctor`: each declaration in a fresh process, so that nothing hides.

A child imports one declaration under the deep side-effect guard and prints its findings as one
JSON line. A child that crashes, hangs for 30 s or prints nothing is itself a finding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cardcage.core.discovery import Candidate
from cardcage.core.errors import PluginLoadError
from cardcage.core.loading import BUDGET_MS, describe, load_declaration, missing_requirements
from cardcage.core.resolver import need_class

TIMEOUT_S = 30.0
_FIELDS = ("kind", "name", "dist", "version", "value", "location", "builtin")
_MARK = "cardcage-doctor:"


def examine_all(
    candidates: Sequence[Candidate], timeout_s: float = TIMEOUT_S
) -> list[dict[str, Any]]:
    """Reports for candidates, in their order: kind, id, status (good, warn, bad, skipped), ms,
    findings. Blocked and shadowed ones are not imported."""
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda c: examine(c, timeout_s), candidates))


def examine(candidate: Candidate, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """One report; starts one process."""
    report: dict[str, Any] = {
        "kind": candidate.kind,
        "id": candidate.id,
        "version": candidate.version,
        "status": "good",
        "ms": None,
        "findings": [],
    }
    if not candidate.usable and candidate.status != "ambiguous":
        bad = candidate.status in ("broken", "incompatible", "unknown-kind")
        report["status"] = "bad" if bad else "skipped"
        report["findings"] = [f"{candidate.status}: {'; '.join(candidate.reasons)}"]
        return report
    command = [sys.executable, "-c", "from cardcage.core.doctor import child; child()"]
    facts = json.dumps({name: getattr(candidate, name) for name in _FIELDS})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [*command, facts], capture_output=True, text=True, timeout=timeout_s, env=env,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        report["status"] = "bad"
        report["findings"] = [f"importing it did not end within {timeout_s:.0f} s"]
        return report
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        report["status"] = "bad"
        report["findings"] = [f"the process ended with code {done.returncode}: {tail}"]
        return report
    report |= json.loads(lines[-1].removeprefix(_MARK))
    if candidate.status == "ambiguous":
        report["findings"] += list(candidate.reasons)
        report["status"] = "warn" if report["status"] == "good" else report["status"]
    return report


def child() -> None:
    """Body of the examining process: the candidate is argv[1], the findings go to stdout."""
    candidate = Candidate(**json.loads(sys.argv[1]))
    warn: list[str] = []
    bad: list[str] = []
    os.environ["CARDCAGE_DEBUG"] = "1"  # the deep guard also watches the host's functions
    _warm_up()

    try:
        declaration = load_declaration(candidate)
    except PluginLoadError:
        bad += candidate.reasons
        declaration = None
    took = candidate.load_ms or 0.0
    if declaration is not None:
        warn += candidate.warnings
        warn += missing_requirements(declaration.caps)
        bad += [w for w in warn if "patched cardcage" in w]
        bad += _purity(candidate.kind, declaration)
    if took > BUDGET_MS:
        warn.append(f"import takes {took:.0f} ms (budget {BUDGET_MS:.0f})")
    status = "bad" if bad else "warn" if warn else "good"
    findings = list(dict.fromkeys([*bad, *warn]))
    print(_MARK + json.dumps({"status": status, "ms": took, "findings": findings}))


def _warm_up() -> None:
    """Import what every declaration may use, so that it is not counted as a plugin's own time."""
    from pydantic import BaseModel, ConfigDict, Field

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        value: int = Field(default=1, ge=1, description="any")

    Options()


def _purity(kind: str, declaration: Any) -> list[str]:
    """`reasons_against` must return a list of text and never raise."""
    check = getattr(declaration, "reasons_against", None)
    if check is None:
        return []
    try:
        reasons = check(need_class(kind)())
    except Exception as error:
        return [f"reasons_against() raised {describe(error)}"]
    if not isinstance(reasons, list) or not all(isinstance(r, str) for r in reasons):
        return ["reasons_against() must return a list of sentences"]
    return []
