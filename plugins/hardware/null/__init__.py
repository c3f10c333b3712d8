"""Declaration of the `null` platform: no device at all, for tests of everything above one."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import DetectResult, HardwareCaps


class Null:
    """No device: for tests of the scheduler and of choices; runs no model."""

    name = "null"
    api = "hardware>=1.0,<2"
    caps = HardwareCaps(device_type="null", vendor="none", priority=10)
    options = None
    roles = frozenset({"core", "worker"})
    activation = "opt-in"
    preferences: dict[str, tuple[str, ...]] = {}

    def detect(self) -> DetectResult:
        """Always usable, but opt-in: only `hardware.use = "null"` takes it."""
        return DetectResult(1, "no device is needed", 0)

    def build(self, need: Any, ctx: Any, options: Any) -> Any:
        """The platform object; never imports torch."""
        from cardcage.plugins.hardware.null.platform import NullPlatform

        return NullPlatform()
