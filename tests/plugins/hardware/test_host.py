"""Facts about the host, read from made-up /proc and /sys folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from cardcage.plugins.hardware import _host

MIB, GIB = _host.MIB, _host.GIB


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 100 kB\n"
          "MemAvailable: 4194304 kB\n")  # fmt: skip
    return tmp_path


def test_meminfo(root: Path) -> None:
    assert _host.meminfo(root) == (4 * GIB, 8 * GIB)
    assert _host.memory(root) == (4 * GIB, 8 * GIB)


def test_meminfo_of_an_old_kernel(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\nMemFree: 1024 kB\n")
    assert _host.meminfo(tmp_path) == (MIB, 2 * MIB)


def test_without_proc_half_of_the_memory_is_called_available(tmp_path: Path) -> None:
    free, total = _host.meminfo(tmp_path)
    assert 0 < free <= total


def test_cgroup_v2_the_tightest_level_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/outer/inner\n")
    base = "sys/fs/cgroup"
    write(root, f"{base}/outer/inner/memory.max", "max\n")
    write(root, f"{base}/outer/memory.max", str(2 * GIB))
    write(root, f"{base}/outer/memory.current", str(GIB + 512 * MIB))
    write(root, f"{base}/outer/memory.stat", f"anon 1\ninactive_file {512 * MIB}\n")
    assert _host.cgroup_memory(root) == (GIB, 2 * GIB)
    assert _host.memory(root) == (GIB, 2 * GIB)


def test_cgroup_v1_and_its_way_to_say_no_limit(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu:/\n4:memory:/box\n0::/\n")
    base = "sys/fs/cgroup/memory"
    write(root, f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, f"{base}/memory.usage_in_bytes", "1\n")
    assert _host.cgroup_memory(root) is None
    write(root, f"{base}/box/memory.limit_in_bytes", str(GIB))
    write(root, f"{base}/box/memory.usage_in_bytes", str(256 * MIB))
    write(root, f"{base}/box/memory.stat", f"total_inactive_file {128 * MIB}\n")
    assert _host.cgroup_memory(root) == (GIB - 128 * MIB, GIB)


def test_container_whose_path_is_not_mounted(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/somewhere/of/the/host\n")
    write(root, "sys/fs/cgroup/memory.max", str(GIB))
    write(root, "sys/fs/cgroup/memory.current", "0")
    assert _host.cgroup_memory(root) == (GIB, GIB)


def test_usage_above_the_limit_is_no_negative_memory(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", str(GIB))
    write(root, "sys/fs/cgroup/memory.current", str(2 * GIB))
    assert _host.memory(root) == (0, GIB)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_usable_cores(root: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        write(root, name, text)
    cores = _host.usable_cores(root)
    assert cores >= 1
    assert most is None or cores == most


def test_cpu_flags_and_name(root: Path) -> None:
    write(root, "proc/cpuinfo", "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 amx_bf16\n")
    assert _host.cpu_flags(root) == {"fpu", "avx2", "amx_bf16"}
    assert _host.cpu_name(root) == "Some CPU"
    write(root, "proc/cpuinfo", "processor : 0\nFeatures : fp asimd bf16\n")
    assert "bf16" in _host.cpu_flags(root)
    assert _host.cpu_name(root)


def test_nothing_to_wait_for() -> None:
    event = _host.NoEvent()
    event.record()
    event.synchronize()
    event.wait()
    assert event.query()
    with _host.NoStream() as stream:
        stream.wait_event(event)
        stream.wait_stream(stream)
        stream.synchronize()
