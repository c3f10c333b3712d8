"""Finds NVIDIA GPUs without torch and without a CUDA context: NVML, then /proc, then Tegra.

Creating a context here would pin memory in the wrong process and make forking unsafe.

Source: NVIDIA Management Library API reference (nvmlInit_v2, nvmlDeviceGetCount_v2).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from cardcage.core.contracts import DetectResult

SCORE = 100
_NVML = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")
_NAME_BYTES = 96


def detect(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> DetectResult:
    """How many NVIDIA devices are visible to this process, and how that was found."""
    env = os.environ if env is None else env
    names, how = _nvml_names(), "NVML"
    if names is None:
        gpus = root / "proc/driver/nvidia/gpus"
        names = [p.name for p in sorted(gpus.iterdir())] if gpus.is_dir() else []
        how = "/proc/driver/nvidia"
    if not names and (root / "dev/nvhost-ctrl-gpu").exists():
        names, how = ["Tegra"], "/dev/nvhost-ctrl-gpu"
    if not names:
        return DetectResult(0, "no NVIDIA driver or device")
    visible = visible_count(len(names), env.get("CUDA_VISIBLE_DEVICES"))
    if visible == 0:
        text = env.get("CUDA_VISIBLE_DEVICES")
        return DetectResult(0, f"{len(names)} NVIDIA GPU hidden by CUDA_VISIBLE_DEVICES={text!r}")
    return DetectResult(SCORE, f"{visible} x {names[0]} ({how})", visible)


def visible_count(installed: int, text: str | None) -> int:
    """Devices left by CUDA_VISIBLE_DEVICES: the list ends at the first index that is invalid."""
    if text is None:
        return installed
    count = 0
    for part in (p.strip() for p in text.split(",")):
        number = part.lstrip("+-")
        if number.isdigit():
            if part.startswith("-") or int(number) >= installed:
                break
        elif not part.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def _nvml_names() -> list[str] | None:
    """Names of all devices by NVML; None when NVML is absent or does not start."""
    library = None
    for name in _NVML:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None or library.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        names = []
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
            found = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            if found and library.nvmlDeviceGetName(handle, text, _NAME_BYTES) == 0:
                names.append(text.value.decode(errors="replace"))
            else:
                names.append("NVIDIA GPU")
        return names
    finally:
        library.nvmlShutdown()
