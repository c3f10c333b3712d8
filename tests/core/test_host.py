"""The composition root: choices that need no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cardcage.core.config import load_config
from cardcage.core.errors import ModelError, SelectionError
from cardcage.core.host import Host


def host(**overrides: Any) -> Host:
    return Host(load_config(env={}, overrides={"hardware": {"use": "cpu"}, **overrides}))


def test_an_unknown_loader_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match='did you mean "gguf"'):
        host(loader={"use": "ggfu"}).open_source("dummy:x")


def test_a_named_loader_is_the_only_one_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="safetensors does not recognise the model reference"):
        host(loader={"use": "safetensors"}).open_source("dummy:x")
    with pytest.raises(ModelError, match="config"):  # the dummy loader itself, by its full name
        host(loader={"use": "cardcage/dummy"}).open_source(f"dummy:{tmp_path}")
    with pytest.raises(ModelError, match="no loader recognises"):
        host().open_source("no such thing")
