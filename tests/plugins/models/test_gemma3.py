"""Gemma 3 text against transformers: two RoPEs, five sliding layers to one full."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig

from cardcage.core.errors import UnsupportedModel
from cardcage.plugins.models.gemma3 import Gemma3
from tests.support.oracle import Oracle, base, check, check_bfloat16

SIZES = base(num_hidden_layers=6, head_dim=16, sliding_window=8)
SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": SCALED, "query_pre_attn_scalar": 20, "final_logit_softcapping": 9.0},
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ],
    ids=["plain", "scaled", "layer_types-untied"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    host = check(Oracle(Gemma3TextConfig(**{**SIZES, **changes})), Gemma3())
    assert {g.kind for g in host.model.kv_groups()} == {"window", "full"}


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Gemma3TextConfig(**SIZES)), Gemma3())


def test_older_config_spelling() -> None:
    old = {
        **SIZES,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    desc = Gemma3().describe(old)
    new = Gemma3().describe({**SIZES, "rope_parameters": SCALED, "sliding_window_pattern": 3})
    assert desc == new
    windows = [layer.branches[0].op.args["window"] for layer in desc.layers]
    assert windows == [8, 8, 0, 8, 8, 0]


def test_images_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="images"):
        Gemma3().describe({"text_config": SIZES, "vision_config": {}})
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        Gemma3().describe({**SIZES, "use_bidirectional_attention": True})
