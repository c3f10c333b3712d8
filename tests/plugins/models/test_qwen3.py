"""Qwen3 against transformers: per-head q and k norms, head size of its own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3Config

from cardcage.plugins.models.qwen3 import Qwen3
from tests.support.oracle import Oracle, base, check, check_bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16, "tie_word_embeddings": True},
        {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 6},
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
    ids=["tied", "biased", "layer_types"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(Qwen3Config(**base(**changes))), Qwen3())


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Qwen3Config(**base(head_dim=16))), Qwen3())


def test_default_head_size() -> None:
    desc = Qwen3().describe(base())
    assert desc.layers[0].branches[0].op.args["head_size"] == 128
