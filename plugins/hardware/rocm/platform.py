"""The `rocm` platform in use. Not run on a device by its authors yet; `explain` says so.

torch reaches AMD GPUs through `torch.cuda`, so `device_type` is "cuda". The compute capability
that torch reports there is the gfx number (9, 4), which compares as a capability does; kernels
that depend on NVIDIA instructions must check `vendor`, which is in the features as "amd".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from cardcage.core.contracts import Violation
from cardcage.plugins.hardware._accelerator import Accelerator, require
from cardcage.plugins.hardware.rocm import Rocm
from cardcage.plugins.hardware.rocm.detect import VISIBLE

# fp8 in hardware: CDNA3 in its own variant (fnuz), later chips in the common one.
_FP8_FNUZ = frozenset({"gfx940", "gfx941", "gfx942"})
_FP8_OCP = frozenset({"gfx950", "gfx1200", "gfx1201"})


class RocmPlatform(Accelerator):
    """AMD GPUs: gfx number as `arch`, chip name and wave size among the features."""

    name = "rocm"
    device_type = "cuda"
    vendor = "amd"
    preferences = Rocm.preferences

    def __init__(self) -> None:
        require("cuda", torch.version.hip, "ROCm", "install a ROCm build of torch")
        super().__init__(torch.cuda)

    def _arch(self) -> tuple[int, ...]:
        return (int(self._properties.major), int(self._properties.minor))

    def _features(self) -> frozenset[str]:
        chip = str(getattr(self._properties, "gcnArchName", "")).split(":")[0]
        found = set(self._base_features()) | {"amd", "graphs", "bf16"}
        found |= {chip} if chip else set()
        found |= {"fp8_fnuz"} if chip in _FP8_FNUZ else set()
        found |= {"fp8"} if chip in _FP8_OCP else set()
        return frozenset(found)

    def constraints(self, config: Mapping[str, Any]) -> list[Violation]:
        """As for every accelerator, and the three visibility variables must agree."""
        found = super().constraints(config)
        settings = {name: os.environ[name] for name in VISIBLE if name in os.environ}
        if len(set(settings.values())) > 1:
            text = ", ".join(f"{k}={v}" for k, v in settings.items())
            found.append(Violation("hardware.use", f"these disagree: {text}", "set one of them"))
        return found

    def explain(self) -> dict[str, Any]:
        """Facts, and that this platform awaits its first run on a device."""
        return {**super().explain(), "tested": False}
