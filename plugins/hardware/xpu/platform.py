"""The `xpu` platform in use. Not run on a device by its authors yet; `explain` says so."""

from __future__ import annotations

from typing import Any

import torch

from cardcage.core.contracts import Default
from cardcage.plugins.hardware._accelerator import Accelerator, require
from cardcage.plugins.hardware.xpu import Xpu


class XpuPlatform(Accelerator):
    """Intel GPUs: no graph capture by default, blocks of 64 tokens, no float64."""

    name = "xpu"
    device_type = "xpu"
    vendor = "intel"
    preferences = Xpu.preferences

    def __init__(self) -> None:
        built = getattr(torch.version, "xpu", None)
        require("xpu", built, "XPU", "install an XPU build of torch")
        super().__init__(torch.xpu)

    def _num_units(self) -> int:
        return int(getattr(self._properties, "gpu_subslice_count", 0))

    def _features(self) -> frozenset[str]:
        found = set(self._base_features())
        if getattr(self._properties, "has_bfloat16_conversions", True):
            found.add("bf16")
        return frozenset(found)

    def dtypes(self) -> tuple[str, ...]:
        """bfloat16 first, where the chip has it."""
        if "bf16" in self._facts.features:
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")

    def defaults(self, config: Any) -> dict[str, Default]:
        """As for every accelerator, with blocks of 64 tokens."""
        found = super().defaults(config)
        found["kv.block_size"] = Default(64, "wider reads suit the memory of Intel GPUs")
        return found

    def explain(self) -> dict[str, Any]:
        """Facts, and that this platform awaits its first run on a device."""
        return {**super().explain(), "tested": False}
