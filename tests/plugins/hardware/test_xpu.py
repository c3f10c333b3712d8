"""The xpu platform: detection on made-up folders. It has not run on a device yet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cardcage.core.config import load_config
from cardcage.core.errors import ResourceError
from cardcage.plugins.hardware._accelerator import Accelerator
from cardcage.plugins.hardware.xpu import Xpu
from cardcage.plugins.hardware.xpu.detect import detect, render_nodes
from cardcage.plugins.hardware.xpu.platform import XpuPlatform


def node(root: Path, index: int, address: str, vendor: str = "0x8086") -> None:
    device = root / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    folder = root / "sys/class/drm" / f"renderD{128 + index}"
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(device)


def test_render_nodes_of_intel_only(tmp_path: Path) -> None:
    node(tmp_path, 0, "0000:00:02.0")
    node(tmp_path, 1, "0000:03:00.0")
    node(tmp_path, 2, "0000:04:00.0", "0x1002")
    assert render_nodes(tmp_path) == ["0000:00:02.0", "0000:03:00.0"]


@pytest.mark.parametrize(
    ("torch_version", "loader", "env", "score", "text"),
    [
        ("2.11+cpu", True, {}, 90, "0000:03:00.0"),
        ("2.11+cpu", False, {}, 0, "no Level Zero loader"),
        ("2.11+xpu", False, {}, 90, "2 Intel GPU"),
        ("2.11+xpu", True, {"ZE_AFFINITY_MASK": ""}, 0, "hidden"),
    ],
)
def test_detection(
    tmp_path: Path, torch_version: str, loader: bool, env: dict[str, str], score: int, text: str
) -> None:
    node(tmp_path, 0, "0000:00:02.0")
    node(tmp_path, 1, "0000:03:00.0")
    found = detect(tmp_path, env, torch_version, lambda: loader)
    assert found.score == score
    assert text in found.reason


def test_built_in_graphics_alone_do_not_count(tmp_path: Path) -> None:
    assert detect(tmp_path, {}, "2.11+cpu", lambda: True).reason == "no Intel render node"
    node(tmp_path, 0, "0000:00:02.0")
    assert "built-in" in detect(tmp_path, {}, "2.11+cpu", lambda: True).reason
    assert detect(tmp_path, {}, "2.11+xpu", lambda: True).num_devices == 1


def test_platform_over_a_fake_backend() -> None:
    properties = SimpleNamespace(
        name="Intel Arc", total_memory=16 << 30, gpu_subslice_count=32,
        has_bfloat16_conversions=False,
    )  # fmt: skip
    backend: Any = SimpleNamespace(
        get_device_properties=lambda index: properties,
        mem_get_info=lambda index: (8 << 30, 16 << 30),
    )
    platform = XpuPlatform.__new__(XpuPlatform)
    Accelerator.__init__(platform, backend)
    assert platform.dtypes() == ("float16", "float32")
    assert platform.facts().num_sms == 32
    assert "graphs" not in platform.facts().features
    assert platform.explain()["tested"] is False
    config = load_config(env={})
    proposals = platform.defaults(config.as_dict())
    patched = config.with_patches([(p, d.value, f"xpu: {d.reason}") for p, d in proposals.items()])
    assert patched.tree.kv.block_size == 64


@pytest.mark.skipif(getattr(torch.version, "xpu", None) is not None, reason="built for XPU")
def test_a_torch_without_xpu_is_said_plainly() -> None:
    with pytest.raises(ResourceError, match="built without XPU"):
        XpuPlatform()


def test_the_declaration_says_that_it_is_untested() -> None:
    assert "untested" in (Xpu.__doc__ or "")
    assert Xpu().detect().score >= 0
