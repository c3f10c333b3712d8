"""The cpu platform."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cardcage.core.config import load_config
from cardcage.core.contracts import HardwareNeed
from cardcage.core.registry import Registry
from cardcage.plugins.hardware import _host
from cardcage.plugins.hardware.cpu import Cpu
from cardcage.plugins.hardware.cpu.platform import CpuPlatform

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def platform() -> Any:
    registry = Registry.discover()
    decision = registry.resolve("hardware", HardwareNeed(), use="cpu")
    return registry.build(decision, HardwareNeed(), None)


def tree(**overrides: Any) -> dict[str, Any]:
    return load_config(env={}, overrides=overrides).as_dict()


def test_it_is_always_found_with_the_lowest_score() -> None:
    found = Cpu().detect()
    assert found.score == 1
    assert "usable cores" in found.reason


def test_queries(platform: Any) -> None:
    assert platform.device() == torch.device("cpu")
    facts = platform.facts()
    assert (facts.device_type, facts.arch) == ("cpu", ())
    free, total = platform.memory()
    assert 0 < free <= total == facts.total_bytes
    assert facts.num_sms >= 1
    platform.synchronize()
    with platform.stream():
        event = platform.event()
        event.record()
        assert event.query()
    assert platform.candidates("attention") == ()
    platform.close()
    platform.close()


def test_dtypes_exist_in_torch(platform: Any) -> None:
    assert sorted(platform.dtypes()) == ["bfloat16", "float16", "float32"]
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in platform.dtypes())


@pytest.mark.parametrize(
    ("flags", "first"),
    [("avx2 avx512f", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")],
)
def test_bf16_first_only_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, flags: str, first: str
) -> None:
    monkeypatch.setattr(_host, "cpu_flags", lambda root=Path("/"): frozenset(flags.split()))
    assert CpuPlatform().dtypes()[0] == first


@pytest.mark.parametrize(("free_gib", "pool_mib"), [(2, 819), (64, 4096), (0.05, 64)])
def test_default_pool(
    platform: Any, monkeypatch: pytest.MonkeyPatch, free_gib: float, pool_mib: int
) -> None:
    free = int(free_gib * _host.GIB)
    monkeypatch.setattr(_host, "memory", lambda root=Path("/"): (free, 2 * free))
    proposal = platform.defaults(tree())["kv.bytes"]
    assert proposal.value == pool_mib * _host.MIB
    assert "available" in proposal.reason


@pytest.mark.parametrize("share", [0.3, 0.9])  # 0.9 is the default, asked for all the same
def test_what_the_user_set_about_the_pool_is_left_alone(platform: Any, share: float) -> None:
    for mine in ({"kv.bytes": "1GiB"}, {"kv.utilization": share}):
        config = load_config(env={}, overrides=mine)
        proposals = platform.defaults(config.as_dict()).items()
        patched = config.with_patches([(p, d.value, f"cpu: {d.reason}") for p, d in proposals])
        assert patched.tree.kv == config.tree.kv


def test_proposals_fit_the_config(platform: Any) -> None:
    config = load_config(env={})
    proposals = platform.defaults(config.as_dict())
    patched = config.with_patches([(p, d.value, f"cpu: {d.reason}") for p, d in proposals.items()])
    assert patched.tree.scheduler.steps_in_flight == 1
    assert patched.origin("kv.bytes").source == "plugin default"
    assert platform.constraints(patched.as_dict()) == []


def test_a_pool_larger_than_memory_is_refused_with_a_fix(platform: Any) -> None:
    found = platform.constraints(tree(**{"kv.bytes": "8000GiB"}))
    assert [v.path for v in found] == ["kv.bytes"]
    assert "MiB" in (found[0].fix or "")


def test_threads_of_workers(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert platform.worker_env() == {"OMP_NUM_THREADS": str(_host.usable_cores())}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert platform.worker_env() == {}


def test_choosing_and_asking_needs_no_torch() -> None:
    code = (
        "import sys; from cardcage.core.registry import Registry\n"
        "from cardcage.core.contracts import HardwareNeed as N\n"
        "r = Registry.discover(); p = r.build(r.resolve('hardware', N(), use='cpu'), N(), None)\n"
        "p.facts(); p.defaults({'kv': {}}); p.constraints({'kv': {}}); p.worker_env()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.strip() == "False", done.stderr
