"""Facts about the host from /proc and /sys: usable cores, memory within limits, CPU features.

No torch and no subprocess. Every reader takes the root of the file system, so that tests bring
their own. Where a file does not exist (other systems), the answer says what is known from
`os.sysconf`.

Source: Linux proc(5), kernel documentation of cgroup v1 and v2.
"""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
_UNLIMITED = 1 << 60


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def meminfo(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes of the machine, before any limit.

    Without /proc/meminfo half of the physical memory is called available.
    """
    values = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[name] = int(number[0]) * 1024
    total = values.get("MemTotal", 0)
    if total:
        return values.get("MemAvailable", values.get("MemFree", total // 2)), total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // 2, total


def _cgroup_folders(root: Path) -> list[tuple[Path, str]]:
    """(folder, version) of this process's memory groups, innermost first, up to the top.

    In a container the path of /proc/self/cgroup may lie outside what is mounted; the mounted
    top is always asked.
    """
    found: list[tuple[Path, str]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and parts[1] == "":
            top, version = root / "sys/fs/cgroup", "v2"
        elif "memory" in parts[1].split(","):
            top, version = root / "sys/fs/cgroup/memory", "v1"
        else:
            continue
        names = [n for n in parts[2].split("/") if n]
        for depth in range(len(names), -1, -1):
            found.append((top.joinpath(*names[:depth]), version))
    return found


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(available, limit) bytes of the tightest memory limit, or None without one.

    Available counts the inactive file cache as free, which the kernel reclaims first.
    """
    best: tuple[int, int] | None = None
    for folder, version in _cgroup_folders(root):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == "v1":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_text, used_text = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
        if not limit_text.isdigit() or int(limit_text) >= _UNLIMITED or not used_text.isdigit():
            continue
        cache = 0
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == names[2] and value.strip().isdigit():
                cache = int(value)
        limit = int(limit_text)
        free = max(0, limit - max(0, int(used_text) - cache))
        if best is None or free < best[0]:
            best = (free, limit)
    return best


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes that this process may use: the machine's, within its cgroup."""
    free, total = meminfo(root)
    limit = cgroup_memory(root)
    if limit is None:
        return free, total
    return min(free, limit[0]), min(total, limit[1])


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on: affinity, then the cgroup's quota, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
        period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction set flags as the kernel names them (x86 "flags", Arm "Features")."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(rest.split())
    return frozenset()


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's own name, or the machine type."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "model name":
            return rest.strip()
    return os.uname().machine


class NoEvent:
    """An event of a device that works in order with the host: always complete."""

    def record(self, stream: object = None) -> None:
        """Nothing to record: all work before this call is done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all recorded work is done."""
        return True

    def wait(self, stream: object = None) -> None:
        """Nothing to order."""


class NoStream:
    """The one stream of a host, as a context manager that changes nothing."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to order."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to order."""
