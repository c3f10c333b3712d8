"""Qwen3-MoE against transformers: renormalised or not, dense layers between, stacked tensors."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from cardcage.plugins.models.qwen3_moe import Qwen3Moe
from tests.support.oracle import Oracle, base, check, check_bfloat16, close
from tests.support.paged import DictSource, Host

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False, "mlp_only_layers": [1]},
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 8},
    ],
    ids=["renorm", "mlp-only", "every-second", "window"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(Qwen3MoeConfig(**base(**EXPERTS, **changes))), Qwen3Moe())


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Qwen3MoeConfig(**base(**EXPERTS))), Qwen3Moe())


def test_stacked_experts_of_transformers_5() -> None:
    oracle = Oracle(Qwen3MoeConfig(**base(**EXPERTS)))
    stacked = {name: t.contiguous() for name, t in oracle.hf.state_dict().items()}
    assert "model.layers.0.mlp.experts.down_proj" in stacked
    host = Host(Qwen3Moe().describe(oracle.config), DictSource(stacked))
    tokens = oracle.tokens(20)
    close(host.prefill(tokens), oracle.logits(tokens), "stacked")
