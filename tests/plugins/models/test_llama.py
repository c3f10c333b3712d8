"""Llama and SmolLM3 against transformers, with every kind of RoPE scaling that they use."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, SmolLM3Config

from cardcage.core.errors import UnsupportedModel
from cardcage.plugins.models.llama import Llama
from tests.support.oracle import Oracle, base, check, check_bfloat16

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6, "head_dim": 16},
        {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5},
        {"rope_parameters": LLAMA3, "hidden_size": 64, "num_attention_heads": 4},
    ],
    ids=["plain", "tied-biased", "mha-head_dim", "mqa-gelu", "llama3"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(LlamaConfig(**base(**changes))), Llama())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8},
        {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "attention_bias": True},
    ],
    ids=["every-fourth", "sliding", "listed"],
)
def test_smollm3_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(SmolLM3Config(**base(pad_token_id=0, **changes))), Llama())


def test_bfloat16() -> None:
    check_bfloat16(Oracle(LlamaConfig(**base(tie_word_embeddings=True))), Llama())


def config(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **base(), **changes}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "ntk-by-magic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ],
)
def test_refuses_what_it_cannot_honour(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        Llama().describe(config(**changes))


def test_older_config_spelling() -> None:
    new = Llama().describe(config(rope_parameters=LLAMA3))
    old_scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old = Llama().describe(config(rope_scaling=old_scaling, rope_theta=500000.0))
    assert old == new
    assert new.ropes["rope"].theta == 500000.0
    off = Llama().describe(config(rope_scaling=None, rope_theta=1e4, residual_multiplier=1.0))
    assert off.ropes["rope"].scaling == {}


def test_older_smollm3_configs_name_no_layer_types() -> None:
    sizes = base(num_hidden_layers=5, pad_token_id=0, sliding_window=8, use_sliding_window=True)
    config = SmolLM3Config(**sizes).to_dict()
    config["architectures"] = ["SmolLM3ForCausalLM"]
    described = Llama().describe(config)
    del config["layer_types"]
    del config["no_rope_layers"]
    assert Llama().describe(config) == described
    layers = [layer.branches[0].op.args for layer in described.layers]
    assert [(a["window"], a["rope"] is None) for a in layers] == [
        (0, False), (0, False), (0, False), (8, True), (0, False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"head_dim": 10**30}, "head_dim"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_parameters": 1}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": [1]}}, "rope_type"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
    ],
)
def test_absurd_values_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    config = {**LlamaConfig().to_dict(), **changes}
    with pytest.raises(UnsupportedModel, match=key):
        Llama().describe(config)
