"""Gemma 2 against transformers: softcaps, 1 + w norms on both sides, alternating windows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma2Config

from cardcage.plugins.models.gemma2 import Gemma2
from tests.support.oracle import Oracle, base, check, check_bfloat16

SIZES = base(num_hidden_layers=4, head_dim=16, sliding_window=8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "num_key_value_heads": 6},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ],
    ids=["plain", "tight-softcap", "no-softcap"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    host = check(Oracle(Gemma2Config(**{**SIZES, **changes})), Gemma2())
    assert [g.kind for g in host.model.kv_groups()] == ["window", "full"]


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Gemma2Config(**SIZES)), Gemma2())


def test_absent_and_null_softcaps() -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    default = Gemma2().describe(sizes)
    assert default.layers[0].branches[0].op.args["softcap"] == 50.0
    assert default.layers[0].branches[0].op.args["head_size"] == 256
    assert default.head.softcap == 30.0
    assert default.head.tied
    off = Gemma2().describe(
        {**sizes, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    )
    assert off.layers[0].branches[0].op.args["softcap"] == 0.0
    assert off.head.softcap == 0.0


def test_older_configs_name_no_layer_types() -> None:
    config = Gemma2Config(**SIZES).to_dict()
    assert config.pop("layer_types") == ["sliding_attention", "full_attention"] * 2
    windows = [layer.branches[0].op.args["window"] for layer in Gemma2().describe(config).layers]
    assert windows == [8, 0, 8, 0]
