"""How blocks read a node's arguments: every one is used or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardcage.core.errors import UnsupportedModel


def refuse_rest(block: str, rest: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if a description passed arguments that the block does not know."""
    if rest:
        names = ", ".join(sorted(rest))
        raise UnsupportedModel(f"block {block!r} has no argument {names}")
