"""Mixtral against transformers, from per-expert tensors and from stacked ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from cardcage.plugins.models.mixtral import Mixtral
from tests.support.oracle import Oracle, base, check, check_bfloat16, close
from tests.support.paged import DictSource, Host


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 4},
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "head_dim": 16},
    ],
    ids=["plain", "window"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    host = check(Oracle(MixtralConfig(**base(**changes))), Mixtral())
    assert not host.model.graph_safe  # a host counts tokens per expert


def test_bfloat16() -> None:
    check_bfloat16(Oracle(MixtralConfig(**base(num_local_experts=4))), Mixtral())


def test_stacked_experts_of_transformers_5() -> None:
    oracle = Oracle(MixtralConfig(**base(num_local_experts=4)))
    assert any(".experts.0.w1." in name for name in oracle.tensors)  # what checkpoints hold
    stacked = {name: t.contiguous() for name, t in oracle.hf.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    host = Host(Mixtral().describe(oracle.config), DictSource(stacked))
    tokens = oracle.tokens(20)
    close(host.prefill(tokens), oracle.logits(tokens), "stacked")
    assert torch.equal(host.step([("a", tokens[:1])]), host.step([("b", tokens[:1])]))
