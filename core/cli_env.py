"""`cardcage collect-env`: what a bug report needs, without importing torch."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cardcage.core.cli import Parser
from cardcage.core.contracts import HardwareNeed
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry

PACKAGES = (
    "torch", "triton", "numpy", "pydantic", "pluggy", "fastapi", "uvicorn", "tokenizers",
    "safetensors", "jinja2", "msgspec", "pyzmq", "transformers",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_SHOWN = ("CARDCAGE_", "CUDA_", "HIP_", "ROCR_", "ZE_", "OMP_", "TRITON_", "PYTORCH_",
          "NVIDIA_VISIBLE")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run `cardcage collect-env`; returns the exit code."""
    parser = Parser(prog="cardcage collect-env", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(list(argv))
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for title, values in facts.items():
        print(f"{title}:")
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for name, value in items:
            print(f"  {value}" if isinstance(name, int) else f"  {name}: {value}")
    return 0


def collect() -> dict[str, Any]:
    """Versions, machine, hardware rows, environment, plugins and what hook plugins add."""
    from cardcage import __version__
    from cardcage.core.hookspecs import active_host

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    registry = Registry.discover(Policy.configured())
    decision = registry.explain("hardware", HardwareNeed())
    facts: dict[str, Any] = {
        "cardcage": {
            "version": __version__,
            "python": sys.version.split()[0],
            "executable": sys.executable,
            "platform": platform.platform(),
            "cores": os.cpu_count(),
        },
        "packages": packages,
        "hardware": [f"{r.id} {r.status}: {r.text()}" for r in decision.rows],
        "environment": _environment(os.environ),
        "plugins": [registry.summary_line(), *registry.warnings()],
    }
    for extra in active_host(registry).call("cardcage_collect_env"):
        for name, value in extra.items():
            facts.setdefault("from plugins", {})[str(name)] = str(value)
    return facts


def _environment(env: Any) -> dict[str, str]:
    """Variables that change how the engine runs; values that look secret are hidden."""
    shown = {n: v for n, v in sorted(env.items()) if n.startswith(_SHOWN)}
    return {n: "***" if any(s in n for s in _SECRET) else v for n, v in shown.items()}
