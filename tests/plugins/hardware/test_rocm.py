"""The rocm platform: detection on made-up folders. It has not run on a device yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cardcage.core.errors import ResourceError
from cardcage.plugins.hardware._accelerator import Accelerator
from cardcage.plugins.hardware.rocm import Rocm
from cardcage.plugins.hardware.rocm.detect import chip_name, detect, gpus
from cardcage.plugins.hardware.rocm.platform import RocmPlatform


@pytest.fixture
def root(tmp_path: Path) -> Path:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, (simd, version) in enumerate([(0, 0), (1216, 90402), (1216, 90402)]):
        (nodes / str(index)).mkdir(parents=True)
        text = f"cpu_cores_count 0\nsimd_count {simd}\ngfx_target_version {version}\n"
        (nodes / str(index) / "properties").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (110000, "gfx1100"), (90010, "gfx90a"), (0, "AMD GPU")]
)
def test_chip_names(number: int, name: str) -> None:
    assert chip_name(number) == name


def test_topology(root: Path, tmp_path: Path) -> None:
    assert gpus(root) == ["gfx942", "gfx942"]
    assert detect(tmp_path / "empty", {}, "2.11").score == 0


def test_a_runtime_is_needed(root: Path) -> None:
    assert "neither ROCm nor" in detect(root, {}, "2.11+cpu").reason
    assert detect(root, {}, "2.11+rocm7.0").num_devices == 2
    library = root / "opt/rocm/lib/libamdhip64.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert detect(root, {}, "2.11+cpu").score > 0


@pytest.mark.parametrize(
    ("env", "score", "count"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, 100, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, 0),
        ({"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}, 100, 2),
    ],
)
def test_visible_devices(root: Path, env: dict[str, str], score: int, count: int) -> None:
    found = detect(root, env, "2.11+rocm7.0")
    assert (found.score, found.num_devices) == (score, count)


def test_variables_that_disagree_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    platform = RocmPlatform.__new__(RocmPlatform)
    properties = SimpleNamespace(
        name="AMD Instinct", total_memory=1 << 37, major=9, minor=4, multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
    )  # fmt: skip
    backend: Any = SimpleNamespace(
        get_device_properties=lambda index: properties,
        mem_get_info=lambda index: (1 << 36, 1 << 37),
    )
    Accelerator.__init__(platform, backend)
    assert {"gfx942", "fp8_fnuz", "amd", "graphs"} <= platform.facts().features
    assert platform.explain()["tested"] is False
    assert platform.constraints({}) == []
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert [v.path for v in platform.constraints({})] == ["hardware.use"]


@pytest.mark.skipif(torch.version.hip is not None, reason="this torch is built for ROCm")
def test_a_torch_without_rocm_is_said_plainly() -> None:
    with pytest.raises(ResourceError, match="built without ROCm"):
        RocmPlatform()


def test_the_declaration_says_that_it_is_untested() -> None:
    assert "untested" in (Rocm.__doc__ or "")
    assert Rocm().detect().score >= 0
