"""Declaration of the `rocm` platform: AMD GPUs. Not run on a device by its authors yet."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import DetectResult, HardwareCaps


class Rocm:
    """AMD GPUs through ROCm (untested on a device); torch calls them "cuda"."""

    name = "rocm"
    api = "hardware>=1.0,<2"
    caps = HardwareCaps(
        device_type="cuda",
        vendor="amd",
        features=frozenset({"graphs", "pinned", "streams", "triton"}),
        priority=50,
    )
    options = None
    roles = frozenset({"core", "worker"})
    preferences: dict[str, tuple[str, ...]] = {"attention": ("triton_paged",)}

    def detect(self) -> DetectResult:
        """Read the kernel driver's topology under /sys; imports no torch."""
        from cardcage.plugins.hardware.rocm.detect import detect

        return detect()

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """The platform object; initialises HIP in this process."""
        from cardcage.plugins.hardware.rocm.platform import RocmPlatform

        return RocmPlatform()
