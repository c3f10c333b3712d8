"""Declaration of the `xpu` platform: Intel GPUs. Not run on a device by its authors yet."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import DetectResult, HardwareCaps


class Xpu:
    """Intel GPUs through Level Zero (untested on a device)."""

    name = "xpu"
    api = "hardware>=1.0,<2"
    caps = HardwareCaps(
        device_type="xpu",
        vendor="intel",
        features=frozenset({"pinned", "streams", "triton"}),
        priority=50,
    )
    options = None
    roles = frozenset({"core", "worker"})
    preferences: dict[str, tuple[str, ...]] = {"attention": ("triton_paged",)}

    def detect(self) -> DetectResult:
        """Read render nodes under /sys and look for the Level Zero loader; imports no torch."""
        from cardcage.plugins.hardware.xpu.detect import detect

        return detect()

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """The platform object; initialises SYCL in this process."""
        from cardcage.plugins.hardware.xpu.platform import XpuPlatform

        return XpuPlatform()
