"""The `cpu` platform in use: memory within limits, dtypes by instruction set, small defaults.

Answers come from /proc, /sys and the process's affinity. Work on a host is in order, so events
and streams do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cardcage.core.contracts import Default, DeviceFacts, Violation
from cardcage.plugins.hardware import _host
from cardcage.plugins.hardware.cpu import Cpu

if TYPE_CHECKING:
    import torch

# Flags with which bf16 products run in hardware. Without one of them torch took 3.8 times as
# long in bf16 as in float32 for 64 rows, and 4.4 times for 512 (576 x 1536, one core of a Xeon
# at 2.8 GHz with AVX-512 but no BF16 instructions, 2026-12).
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# A step of 1024 tokens keeps the wait of decoding requests below a second or two for a model of
# a few hundred million parameters; a host gains nothing from larger products.
_STEP_TOKENS = 1024
_SEQS = 64
_POOL_SHARE = 0.4
_POOL_MAX = 4 * _host.GIB
_POOL_MIN = 64 * _host.MIB


class CpuPlatform:
    """The host as a platform. Pure queries; keeps no state but what it read at start."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        self._flags = _host.cpu_flags()

    def device(self) -> torch.device:
        """torch's name for the host."""
        import torch

        return torch.device("cpu")

    def facts(self) -> DeviceFacts:
        """Name, memory and instruction sets; num_sms is the number of usable cores."""
        free, total = self.memory()
        keep = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd",
                "bf16", "i8mm", "sve")  # fmt: skip
        return DeviceFacts(
            name=_host.cpu_name(),
            device_type="cpu",
            arch=(),
            total_bytes=total,
            free_bytes=free,
            num_sms=_host.usable_cores(),
            features=frozenset(f for f in keep if f in self._flags),
        )

    def memory(self) -> tuple[int, int]:
        """(available, total) bytes now, within the memory limit of the process's cgroup."""
        return _host.memory()

    def dtypes(self) -> tuple[str, ...]:
        """float32 first, unless the processor multiplies bf16 in hardware."""
        if self._flags & _BF16_FLAGS:
            return ("bfloat16", "float32", "float16")
        return ("float32", "bfloat16", "float16")

    def synchronize(self) -> None:
        """Host work is done when its call returns."""

    def event(self) -> Any:
        """An event that is always complete."""
        return _host.NoEvent()

    def stream(self) -> Any:
        """A context manager that changes nothing."""
        return _host.NoStream()

    def candidates(self, kind: str) -> tuple[str, ...]:
        """No preference: see `Cpu.preferences`."""
        return Cpu.preferences.get(kind, ())

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Default]:
        """Sizes for a host: a share of free memory for the pool, small steps, one in flight."""
        free, _ = self.memory()
        size = max(_POOL_MIN, min(_POOL_MAX, int(free * _POOL_SHARE)))
        return {
            "scheduler.max_num_batched_tokens": Default(
                _STEP_TOKENS, "short steps keep decoding requests moving on a host"
            ),
            "scheduler.max_num_seqs": Default(_SEQS, "a host gains little from larger batches"),
            "scheduler.steps_in_flight": Default(1, "the host itself does the work of a step"),
            "kv.bytes": Default(
                size // _host.MIB * _host.MIB,
                f"{_POOL_SHARE:.0%} of {free / _host.GIB:.1f} GiB available, at most 4 GiB",
            ),
        }

    def constraints(self, config: Mapping[str, Any]) -> list[Violation]:
        """A pool must fit into the memory that the process may use."""
        wanted = config.get("kv", {}).get("bytes")
        free, total = self.memory()
        if wanted is not None and wanted > free:
            return [
                Violation(
                    "kv.bytes",
                    f"{wanted} bytes are more than the {free} available of {total}",
                    f"set it to at most {int(free * 0.8) // _host.MIB} MiB",
                )
            ]
        return []

    def worker_env(self) -> dict[str, str]:
        """Threads for a worker process: the usable cores, unless the user said otherwise."""
        if "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(_host.usable_cores())}

    def close(self) -> None:
        """Nothing is held."""
