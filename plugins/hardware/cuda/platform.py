"""The `cuda` platform in use. Creating it initialises CUDA in this process."""

from __future__ import annotations

import torch

from cardcage.core.errors import ResourceError
from cardcage.plugins.hardware._accelerator import Accelerator, require
from cardcage.plugins.hardware.cuda import Cuda

_FP8 = (8, 9)
_BF16 = (8, 0)
_TMA = (9, 0)


class CudaPlatform(Accelerator):
    """NVIDIA GPUs: compute capability as `arch`, bf16 from 8.0, graphs always."""

    name = "cuda"
    device_type = "cuda"
    vendor = "nvidia"
    preferences = Cuda.preferences

    def __init__(self) -> None:
        require("cuda", torch.version.cuda, "CUDA", "install a CUDA build of torch")
        super().__init__(torch.cuda)
        problem = arch_problem(self._facts.arch, torch.cuda.get_arch_list())
        if problem:
            raise ResourceError(
                f"{self._facts.name} has compute capability {problem}; install a torch build "
                'for it, or set hardware.use = "cpu"'
            )

    def _arch(self) -> tuple[int, ...]:
        return (int(self._properties.major), int(self._properties.minor))

    def _features(self) -> frozenset[str]:
        arch = self._arch()
        found = set(self._base_features()) | {"graphs"}
        found |= {"bf16"} if arch >= _BF16 else set()
        found |= {"fp8"} if arch >= _FP8 else set()
        found |= {"tma"} if arch >= _TMA else set()
        return frozenset(found)

    def dtypes(self) -> tuple[str, ...]:
        """bfloat16 first where the chip computes in it (capability 8.0 and above)."""
        if self._facts.arch >= _BF16:
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")


def arch_problem(arch: tuple[int, ...], built_for: list[str]) -> str | None:
    """Why a torch build has no code for a device, or None.

    Machine code of the same major capability and a lower or equal minor runs; intermediate code
    (`compute_XY`) of a lower or equal capability is translated by the driver.
    """
    for name in built_for:
        head, _, digits = name.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        if not number:
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if head == "sm" and major == arch[0] and minor <= arch[1]:
            return None
        if head == "compute" and (major, minor) <= tuple(arch):
            return None
    listed = ", ".join(built_for) or "nothing"
    return f"{arch[0]}.{arch[1]}, and this torch has code for {listed}"
