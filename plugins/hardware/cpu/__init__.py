"""Declaration of the `cpu` platform: the host processor, chosen when no accelerator is seen."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import DetectResult, HardwareCaps


class Cpu:
    """The host processor: always there, taken when no accelerator is visible."""

    name = "cpu"
    api = "hardware>=1.0,<2"
    caps = HardwareCaps(device_type="cpu", vendor="host", priority=10)
    options = None
    roles = frozenset({"core", "worker"})
    # No opinion: which attention is best on a host is told by the candidates' own priority.
    preferences: dict[str, tuple[str, ...]] = {}

    def detect(self) -> DetectResult:
        """Always found, with the lowest score; reads only /proc."""
        from cardcage.plugins.hardware import _host

        free, total = _host.memory()
        cores = _host.usable_cores()
        text = f"{cores} usable cores, {free / _host.GIB:.1f} of {total / _host.GIB:.1f} GiB free"
        return DetectResult(1, text, 1)

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """The platform object; torch is imported by the calls that return torch objects."""
        from cardcage.plugins.hardware.cpu.platform import CpuPlatform

        return CpuPlatform()
