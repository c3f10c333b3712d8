"""Qwen2 against transformers: biases on q, k, v; upper layers that slide; YaRN."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from cardcage.plugins.models.qwen2 import Qwen2
from tests.support.oracle import Oracle, base, check, check_bfloat16

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 8, "num_key_value_heads": 3},
        {"rope_parameters": YARN},
    ],
    ids=["tied", "upper-layers-slide", "window-off", "yarn"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(Qwen2Config(**base(**changes))), Qwen2())


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Qwen2Config(**base())), Qwen2())


def test_two_groups_when_some_layers_slide() -> None:
    config = base(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    desc = Qwen2().describe({**config, "architectures": ["Qwen2ForCausalLM"]})
    assert [layer.branches[0].op.args["window"] for layer in desc.layers] == [0, 8, 8]
