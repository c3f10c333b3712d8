"""What the platforms that torch reaches through `torch.cuda` or `torch.xpu` have in common.

Imported by `build` only. `cuda` (NVIDIA), `rocm` (AMD, also under `torch.cuda`) and `xpu`
(Intel) fill in what differs: capability names, dtypes, build checks and proposals.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from cardcage.core.contracts import Default, DeviceFacts, Violation
from cardcage.core.errors import ResourceError
from cardcage.plugins.hardware import _host

# Tokens and requests per step by device memory, in GiB: below 70, from 70. Larger steps make
# fuller products until latency suffers; larger tables cost memory that small devices lack.
_LARGE_GIB = 70
_STEP_TOKENS = {False: 2048, True: 8192}
_SEQS = {False: 256, True: 1024}


class Accelerator:
    """A platform over one device of a torch backend module. Device 0 of those visible."""

    name = ""
    device_type = ""
    vendor = ""
    preferences: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, backend: Any) -> None:
        self._torch = backend
        self._index = 0
        self._properties = backend.get_device_properties(self._index)
        total = int(self._properties.total_memory)
        self._facts = DeviceFacts(
            name=str(self._properties.name),
            device_type=self.device_type,
            arch=self._arch(),
            total_bytes=total,
            free_bytes=0,
            num_sms=self._num_units(),
            features=self._features(),
        )

    # ---- what differs

    def _arch(self) -> tuple[int, ...]:
        return ()

    def _num_units(self) -> int:
        return int(getattr(self._properties, "multi_processor_count", 0))

    def _features(self) -> frozenset[str]:
        return frozenset()

    def _base_features(self) -> frozenset[str]:
        found = {"streams", "pinned"}
        if importlib.util.find_spec("triton") is not None:
            found.add("triton")
        return frozenset(found)

    def dtypes(self) -> tuple[str, ...]:
        """bfloat16 first; platforms without it say so themselves."""
        return ("bfloat16", "float16", "float32")

    # ---- queries

    def device(self) -> torch.device:
        """The first visible device."""
        return torch.device(self.device_type, self._index)

    def facts(self) -> DeviceFacts:
        """Cached at start, but for the free memory, which is read now."""
        free, total = self.memory()
        known = self._facts
        return DeviceFacts(
            known.name, known.device_type, known.arch, total, free, known.num_sms, known.features
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes by the driver; a device that shares the host's memory is limited
        by what the host has available."""
        free, total = self._torch.mem_get_info(self._index)
        if getattr(self._properties, "is_integrated", False):
            free = min(free, _host.memory()[0])
        return int(free), int(total)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._torch.synchronize(self._index)

    def event(self) -> Any:
        """An event without timing; waiting for it spins, which answers soonest."""
        return self._torch.Event()

    def stream(self) -> Any:
        """A new side stream, usable as `with stream:`."""
        return self._torch.Stream(self.device())

    def candidates(self, kind: str) -> tuple[str, ...]:
        """Names in order of preference for a kind, () for no opinion."""
        return self.preferences.get(kind, ())

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Default]:
        """Step and batch sizes by device memory."""
        size = self._facts.total_bytes / _host.GIB
        large = size >= _LARGE_GIB
        reason = f"{self._facts.name} has {size:.0f} GiB"
        return {
            "scheduler.max_num_batched_tokens": Default(_STEP_TOKENS[large], reason),
            "scheduler.max_num_seqs": Default(_SEQS[large], reason),
        }

    def constraints(self, config: Mapping[str, Any]) -> list[Violation]:
        """dtype must be one the device computes in; the pool must fit its memory."""
        found = []
        dtype = config.get("dtype", "auto")
        if dtype != "auto" and dtype not in self.dtypes():
            found.append(
                Violation(
                    "dtype",
                    f"{self._facts.name} does not compute in {dtype}",
                    f"use {', '.join(self.dtypes())}",
                )
            )
        wanted = config.get("kv", {}).get("bytes")
        if wanted is not None and wanted > self._facts.total_bytes:
            found.append(
                Violation(
                    "kv.bytes",
                    f"{wanted} bytes are more than the device's {self._facts.total_bytes}",
                    "leave it unset to size the pool from kv.utilization",
                )
            )
        return found

    def worker_env(self) -> dict[str, str]:
        """Nothing to set."""
        return {}

    def explain(self) -> dict[str, Any]:
        """What was found, JSON-able; `tested` says whether this code ran on such a device."""
        facts = self._facts
        return {
            "platform": self.name,
            "device": facts.name,
            "arch": list(facts.arch),
            "total_bytes": facts.total_bytes,
            "features": sorted(facts.features),
        }

    def close(self) -> None:
        """Nothing is held beyond what torch itself holds."""


def require(backend: str, wanted_version: Any, platform: str, install: str) -> None:
    """Check that the installed torch was built for this platform and sees a device.

    Args:
        backend: "cuda" or "xpu", the module under torch.
        wanted_version: the build's version string (`torch.version.cuda`), None = not built for.
        platform: the platform's name, for the message.
        install: how to get the right build.

    Raises:
        ResourceError: another build of torch, or one that the driver does not serve.
    """
    if wanted_version is None:
        raise ResourceError(
            f"a {platform} device is here, but torch {torch.__version__} is built without "
            f'{platform}; {install}, or set hardware.use = "cpu"'
        )
    if not getattr(torch, backend).is_available():
        raise ResourceError(
            f"a {platform} device is here, but torch {torch.__version__} (built for {platform} "
            f"{wanted_version}) cannot use it: driver too old, no permission, or hidden by "
            'the environment; run nvidia-smi, rocm-smi or xpu-smi, or set hardware.use = "cpu"'
        )
