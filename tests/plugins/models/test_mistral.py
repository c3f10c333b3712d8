"""Mistral against transformers: with and without a window, head size of its own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig

from cardcage.plugins.models.mistral import Mistral
from tests.support.oracle import Oracle, base, check, check_bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8},
        {"sliding_window": None, "head_dim": 16},
        {"sliding_window": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
    ids=["window", "head_dim", "odd-window-tied"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    host = check(Oracle(MistralConfig(**base(**changes))), Mistral())
    (group,) = host.model.kv_groups()
    window = changes["sliding_window"]
    assert group.options == ({"window": window} if window else {})


def test_bfloat16() -> None:
    check_bfloat16(Oracle(MistralConfig(**base(sliding_window=8))), Mistral())


@pytest.mark.parametrize(("given", "window"), [({"sliding_window": 64}, 64), ({}, 0), (
    {"sliding_window": None}, 0), ({"sliding_window": 256}, 0)])  # fmt: skip
def test_window_that_never_bites_is_none(given: dict[str, Any], window: int) -> None:
    """256 is the model's whole context, and so is the default of 4096."""
    desc = Mistral().describe({**base(), **given})
    assert desc.layers[0].branches[0].op.args["window"] == window
