"""Compiles kernels.c for this host once and loads it.

The library is cached by a digest of its source, the element type and the processor's features. It
is linked without any runtime of its own: threads come from the OpenMP runtime that torch has
already loaded (one thread pool in the process, not two that spin against each other); where that
is missing, or the compiler speaks to another one, it is compiled without threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cardcage.core.errors import PluginLoadError

from . import COMPILERS

SOURCE = Path(__file__).with_name("kernels.c")
COMMON = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
ATTEMPTS = (
    # Where there are 512-bit vectors, compilers still prefer halves of them unless told.
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
COMPILE_TIMEOUT_S = 120


def load(bf16: bool, cache_dir: Path) -> ctypes.CDLL:
    """The library for bfloat16 or float32, compiled if it is not in `cache_dir` yet.

    Raises:
        PluginLoadError: no compiler, or none of the attempts gave a library that loads.
    """
    source = SOURCE.read_bytes()
    digest = hashlib.sha256(b"|".join([source, str(ATTEMPTS).encode(), _processor()])).hexdigest()
    path = cache_dir / f"cpu_paged-{'bf16' if bf16 else 'float32'}-{digest[:16]}.so"
    runtime = _openmp_runtime()
    if runtime is not None:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # made for another system on a shared disk, or cut short
            path.unlink(missing_ok=True)
    return _compile(bf16, path, threads=runtime is not None)


def _compile(bf16: bool, path: Path, threads: bool) -> ctypes.CDLL:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise PluginLoadError(
            "cpu_paged needs a C compiler and found none; install gcc or clang, or set "
            'attention.use = "torch_reference"'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for flags in ATTEMPTS:
        if "-fopenmp" in flags and not threads:
            continue
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made, library = Path(work) / "kernels.o", Path(work) / "kernels.so"
            commands = (
                [compiler, *COMMON, *flags, f"-DBF16={int(bf16)}", "-c", str(SOURCE), "-o", made],
                [compiler, "-shared", "-nostdlib", str(made), "-o", library],
            )
            try:
                for command in commands:
                    subprocess.run(
                        command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
                    )
                loaded = ctypes.CDLL(str(library))
                os.replace(library, path)
            except subprocess.CalledProcessError as error:
                problems.append(error.stderr.decode(errors="replace").strip()[-300:])
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(str(error)[-300:])
            else:
                return loaded
    raise PluginLoadError(
        f"cpu_paged could not be compiled with {compiler}: {problems[-1]}; repair the compiler, or "
        'set attention.use = "torch_reference"'
    )


def _processor() -> bytes:
    """What tells processors apart whose code may differ."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    found = re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(found))).encode() + platform.machine().encode()


def _openmp_runtime() -> str | None:
    """Path of the GNU-compatible OpenMP runtime that torch has loaded into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5)[^\s/]*\.so[^\s/]*)$", maps, re.MULTILINE)
    return found.group(1) if found else None
