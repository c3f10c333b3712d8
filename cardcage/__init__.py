"""Cardcage: an LLM inference engine whose every part is a plugin.

The public names are resolved on first use, so that `import cardcage` stays light: it imports
neither torch nor a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from cardcage.core.client import AsyncEngine
    from cardcage.core.engine import Engine
    from cardcage.core.llm import LLM
    from cardcage.core.types import SamplingParams

_HOMES = {
    "LLM": "cardcage.core.llm",
    "AsyncEngine": "cardcage.core.client",
    "Engine": "cardcage.core.engine",
    "SamplingParams": "cardcage.core.types",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cardcage' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
