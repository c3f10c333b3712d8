"""Finds AMD GPUs from the kernel driver's topology under /sys; no torch, no HIP call.

A GPU counts when the user-space runtime is there too (a HIP library, or a torch build for
ROCm): without one nothing could use it, and processors with built-in graphics appear in the
same topology. Not run on a device by its authors yet; tested on made-up folders.

Source: Linux kernel documentation of amdkfd topology (simd_count, gfx_target_version).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cardcage.core.contracts import DetectResult

SCORE = 100
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_LIBRARIES = ("opt/rocm/lib/libamdhip64.so", "usr/lib/x86_64-linux-gnu/libamdhip64.so",
              "usr/lib64/libamdhip64.so")  # fmt: skip


def detect(
    root: Path = Path("/"), env: Mapping[str, str] | None = None, torch_version: str | None = None
) -> DetectResult:
    """How many AMD GPUs this process can see, and what was found."""
    env = os.environ if env is None else env
    chips = gpus(root)
    if not chips:
        return DetectResult(0, "no AMD GPU in the kernel driver's topology")
    runtime = _runtime(root, torch_version)
    if runtime is None:
        return DetectResult(0, f"{len(chips)} x {chips[0]}, but neither ROCm nor a ROCm torch")
    for name in VISIBLE:
        if env.get(name) in ("", "-1"):
            return DetectResult(0, f"{len(chips)} AMD GPU hidden by {name}={env[name]!r}")
    settings = {env[name] for name in VISIBLE if name in env}
    if len(settings) > 1:
        listed = ", ".join(f"{n}={env[n]}" for n in VISIBLE if n in env)
        return DetectResult(SCORE, f"{len(chips)} x {chips[0]}; these disagree: {listed}", 1)
    count = len(settings.pop().split(",")) if settings else len(chips)
    return DetectResult(SCORE, f"{count} x {chips[0]} ({runtime})", count)


def gpus(root: Path) -> list[str]:
    """Chip names (gfx942, ...) of the topology's GPU nodes."""
    found = []
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            text = (node / "properties").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        values = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) >= 2)
        if int(values.get("simd_count", "0")) > 0:
            found.append(chip_name(int(values.get("gfx_target_version", "0"))))
    return found


def chip_name(number: int) -> str:
    """gfx name of the driver's number: 90402 is gfx942, 110000 is gfx1100."""
    major, minor, step = number // 10000, number // 100 % 100, number % 100
    return f"gfx{major}{minor}{step:x}" if number else "AMD GPU"


def _runtime(root: Path, torch_version: str | None) -> str | None:
    if torch_version is None:
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = ""
    if "rocm" in torch_version or "+hip" in torch_version:
        return f"torch {torch_version}"
    for name in _LIBRARIES:
        if (root / name).exists():
            return f"/{name}"
    return None
