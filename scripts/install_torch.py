"""Install torch into the Python given: the CPU build where there is no GPU.

    install_torch.py PYTHON

The default wheel of torch for Linux carries several gigabytes of CUDA libraries, useless
without a device. Without one, the CPU build is taken when pip can find it (a wheel directory
configured for pip, or PyTorch's own index); otherwise the default wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_accelerator() -> bool:
    """True when an NVIDIA, AMD or Intel GPU driver is visible, without any library."""
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return True
    return Path("/dev/kfd").exists()


def pip(python: str, *arguments: str) -> bool:
    """True when pip could install it."""
    command = [python, "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def installed(python: str) -> bool:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def main() -> int:
    python = sys.argv[1]
    if installed(python):
        return 0
    if has_accelerator() or sys.platform != "linux":
        return 0 if pip(python, "torch>=2.11") else 1
    print("no GPU found: installing the CPU build of torch", flush=True)
    # An exact version lets pip take a CPU wheel from a local wheel directory if one is set up.
    attempts = ([f"torch=={VERSION}+cpu"], [f"torch=={VERSION}", "--index-url", CPU_INDEX])
    return 0 if any(pip(python, *a) for a in (*attempts, [f"torch=={VERSION}"])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
