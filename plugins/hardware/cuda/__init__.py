"""Declaration of the `cuda` platform: NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import DetectResult, HardwareCaps


class Cuda:
    """NVIDIA GPUs through CUDA; found through NVML, without creating a context."""

    name = "cuda"
    api = "hardware>=1.0,<2"
    caps = HardwareCaps(
        device_type="cuda",
        vendor="nvidia",
        features=frozenset({"graphs", "pinned", "streams", "triton"}),
        priority=50,
    )
    options = None
    roles = frozenset({"core", "worker"})
    preferences: dict[str, tuple[str, ...]] = {"attention": ("triton_paged",)}

    def detect(self) -> DetectResult:
        """Count the visible devices by NVML or /proc; imports no torch."""
        from cardcage.plugins.hardware.cuda.detect import detect

        return detect()

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """The platform object; initialises CUDA in this process."""
        from cardcage.plugins.hardware.cuda.platform import CudaPlatform

        return CudaPlatform()
