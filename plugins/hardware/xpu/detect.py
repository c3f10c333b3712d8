"""Finds Intel GPUs from render nodes under /sys and the Level Zero loader; no torch.

Built-in graphics (PCI 0000:00:02.0) count only with a torch build for XPU: almost every Intel
laptop has them, and they are not why somebody runs an engine. Not run on a device by its
authors yet; tested on made-up folders.

Source: Linux sysfs of DRM render nodes; oneAPI Level Zero loader.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cardcage.core.contracts import DetectResult

SCORE = 90
_INTEL = "0x8086"
_BUILT_IN = "0000:00:02.0"


def detect(
    root: Path = Path("/"),
    env: Mapping[str, str] | None = None,
    torch_version: str | None = None,
    has_loader: Callable[[], bool] | None = None,
) -> DetectResult:
    """How many Intel GPUs this process can see, and what was found."""
    env = os.environ if env is None else env
    if torch_version is None:
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = ""
    built_for_xpu = "xpu" in torch_version
    cards = render_nodes(root)
    if not cards:
        return DetectResult(0, "no Intel render node")
    wanted = [c for c in cards if built_for_xpu or c != _BUILT_IN]
    if not wanted:
        return DetectResult(0, "built-in Intel graphics only, and torch is no XPU build")
    if not built_for_xpu and not (has_loader or _has_loader)():
        return DetectResult(0, f"{len(wanted)} Intel GPU, but no Level Zero loader")
    if env.get("ZE_AFFINITY_MASK") == "":
        return DetectResult(0, f"{len(wanted)} Intel GPU hidden by an empty ZE_AFFINITY_MASK")
    return DetectResult(SCORE, f"{len(wanted)} Intel GPU at PCI {', '.join(wanted)}", len(wanted))


def render_nodes(root: Path) -> list[str]:
    """PCI addresses of Intel devices with a render node."""
    folder = root / "sys/class/drm"
    found = []
    for node in sorted(folder.glob("renderD*")) if folder.is_dir() else []:
        try:
            vendor = (node / "device/vendor").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if vendor == _INTEL:
            found.append((node / "device").resolve().name)
    return found


def _has_loader() -> bool:
    try:
        ctypes.CDLL("libze_loader.so.1")
    except OSError:
        return False
    return True
