"""The cuda platform: detection without a context, build checks, and a real device (gpu tier)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cardcage.core.config import load_config
from cardcage.core.contracts import HardwareNeed
from cardcage.core.errors import ResourceError
from cardcage.core.registry import Registry
from cardcage.plugins.hardware._accelerator import Accelerator
from cardcage.plugins.hardware.cuda import detect as detecting
from cardcage.plugins.hardware.cuda.platform import CudaPlatform, arch_problem

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,9,1", 1),  # the list ends at the first invalid index
        ("GPU-abc,MIG-def", 2),
        ("NoDevFiles", 0),
        ("1, 2", 2),
    ],
)
def test_visible_devices(text: str | None, count: int) -> None:
    assert detecting.visible_count(4, text) == count


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detecting, "_nvml_names", lambda: None)


def test_no_driver(tmp_path: Path, no_nvml: None) -> None:
    found = detecting.detect(tmp_path, {})
    assert (found.score, found.num_devices) == (0, 0)


def test_by_proc_when_nvml_is_absent(tmp_path: Path, no_nvml: None) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    found = detecting.detect(tmp_path, {})
    assert found.num_devices == 2
    assert "/proc/driver/nvidia" in found.reason
    hidden = detecting.detect(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.score == 0
    assert "hidden by CUDA_VISIBLE_DEVICES" in hidden.reason


def test_tegra(tmp_path: Path, no_nvml: None) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvhost-ctrl-gpu").touch()
    assert detecting.detect(tmp_path, {}).num_devices == 1


class FakeNvml:
    def __init__(self, names: list[bytes], init: int = 0) -> None:
        self.names, self.init, self.shut = names, init, False

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        self.shut = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = self.names[handle.value - 1]
        return 0


def test_by_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = FakeNvml([b"NVIDIA H200", b"NVIDIA H200"])
    monkeypatch.setattr(detecting.ctypes, "CDLL", lambda name: library)
    found = detecting.detect(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    assert found.reason == "1 x NVIDIA H200 (NVML)"
    assert library.shut


def test_nvml_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(detecting.ctypes, "CDLL", lambda name: FakeNvml([], init=9))
    assert detecting.detect(tmp_path, {}).score == 0


def test_detection_imports_no_torch() -> None:
    code = (
        "import sys; from cardcage.core.registry import Registry\n"
        "from cardcage.core.contracts import HardwareNeed\n"
        "Registry.discover().explain('hardware', HardwareNeed()); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("arch", "built", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80", "sm_90"], True),  # same major, lower minor
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # the driver translates
        ((12, 0), ["sm_120a"], True),
        ((12, 0), ["sm_90"], False),
        ((9, 0), [], False),
    ],
)
def test_code_for_the_chip(arch: tuple[int, int], built: list[str], fits: bool) -> None:
    problem = arch_problem(arch, built)
    assert (problem is None) is fits
    assert fits or f"{arch[0]}.{arch[1]}" in (problem or "")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda_is_said_plainly() -> None:
    with pytest.raises(ResourceError, match="built without CUDA"):
        CudaPlatform()


def fake(total_gib: float, **properties: Any) -> SimpleNamespace:
    total = int(total_gib * GIB)
    values = {"name": "Fake", "total_memory": total, "major": 9, "minor": 0,
              "multi_processor_count": 132, **properties}  # fmt: skip
    return SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(**values),
        mem_get_info=lambda index: (total // 2, total),
    )


def make(total_gib: float, **properties: Any) -> CudaPlatform:
    platform = CudaPlatform.__new__(CudaPlatform)
    Accelerator.__init__(platform, fake(total_gib, **properties))
    return platform


@pytest.mark.parametrize(
    ("gib", "tokens", "seqs"), [(24, 2048, 256), (80, 8192, 1024), (140, 8192, 1024)]
)
def test_proposals_by_memory(gib: float, tokens: int, seqs: int) -> None:
    config = load_config(env={})
    proposals = make(gib).defaults(config.as_dict())
    patched = config.with_patches([(p, d.value, f"cuda: {d.reason}") for p, d in proposals.items()])
    assert patched.tree.scheduler.max_num_batched_tokens == tokens
    assert patched.tree.scheduler.max_num_seqs == seqs


def test_facts_and_features() -> None:
    platform = make(80)
    facts = platform.facts()
    assert facts.arch == (9, 0)
    assert facts.num_sms == 132
    assert facts.free_bytes == 40 * GIB
    assert {"graphs", "fp8", "bf16", "tma", "streams"} <= facts.features
    assert platform.candidates("attention") == ("triton_paged",)
    assert platform.candidates("linear") == ()
    old = make(16, major=7, minor=5)
    assert not {"bf16", "fp8", "tma"} & old.facts().features
    assert old.dtypes() == ("float16", "float32")


def test_memory_shared_with_the_host_is_limited_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cardcage.plugins.hardware import _host

    monkeypatch.setattr(_host, "memory", lambda root=Path("/"): (GIB, 2 * GIB))
    assert make(80, is_integrated=True).memory()[0] == GIB
    assert make(80).memory()[0] == 40 * GIB


def test_constraints() -> None:
    def paths(platform: CudaPlatform, **overrides: Any) -> list[str]:
        tree = load_config(env={}, overrides=overrides).as_dict()
        return [v.path for v in platform.constraints(tree)]

    old = make(16, major=7, minor=5)
    assert paths(old, dtype="bfloat16") == ["dtype"]
    assert paths(old, dtype="float16") == []
    assert paths(old, **{"kv.bytes": "32GiB"}) == ["kv.bytes"]
    assert paths(make(80), dtype="bfloat16") == []


@pytest.mark.gpu
def test_a_real_device() -> None:
    registry = Registry.discover()
    decision = registry.resolve("hardware", HardwareNeed())
    assert decision.chosen is not None
    assert decision.chosen.name == "cuda"
    platform = registry.build(decision, HardwareNeed(), None)
    facts = platform.facts()
    assert facts.arch == torch.cuda.get_device_capability(0)
    assert 0 < facts.free_bytes <= facts.total_bytes
    device = platform.device()
    x = torch.ones(1024, 1024, device=device)
    side = platform.stream()
    ready, done = platform.event(), platform.event()
    ready.record()
    with side:
        side.wait_event(ready)
        y = x @ x
        done.record()
    done.synchronize()
    assert done.query()
    assert float(y[0, 0]) == 1024.0
    platform.synchronize()
    free, total = platform.memory()
    hold = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    assert platform.memory()[0] < free
    assert platform.memory()[1] == total
    del hold
    assert platform.constraints({"dtype": "bfloat16", "kv": {"bytes": None}}) == []
    assert platform.explain()["platform"] == "cuda"
    platform.close()


@pytest.mark.gpu
def test_detection_creates_no_context() -> None:
    """NVML is asked in a process whose CUDA runtime stays untouched."""
    code = (
        "import torch; from cardcage.plugins.hardware.cuda import Cuda\n"
        "found = Cuda().detect()\n"
        "print(found.score, found.num_devices, torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.split() == ["100", str(torch.cuda.device_count()), "False"], done.stderr
