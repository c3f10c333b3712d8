"""Phi-3 against transformers: fused tensors, partial rotation, LongRoPE on both sides."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Phi3Config

from cardcage.core.errors import UnsupportedModel
from cardcage.plugins.models.phi3 import Phi3
from tests.support.oracle import Oracle, base, check, check_bfloat16, close
from tests.support.paged import Host

SIZES = base(pad_token_id=0)
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 6, "sliding_window": 8},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
            "hidden_size": 96,
            "tie_word_embeddings": True,
        },
    ],
    ids=["plain", "window", "partial-tied"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(Phi3Config(**{**SIZES, **changes})), Phi3())


def test_longrope_takes_its_factors_by_the_served_context() -> None:
    """transformers switches by the length at hand; we serve one context, so each side is
    compared with lengths on its own side of the original context."""
    config = Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=dict(LONG))
    oracle = Oracle(config)
    desc = Phi3().describe(oracle.config)
    short = Host(desc, oracle.source, max_model_len=64)
    tokens = oracle.tokens(60)
    close(short.prefill(tokens, [13, 20]), oracle.logits(tokens), "short")
    long = Host(desc, oracle.source)
    tokens = oracle.tokens(90)
    close(long.prefill(tokens, [13, 20]), oracle.logits(tokens), "long")


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Phi3Config(**SIZES)), Phi3())


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_older_spellings_of_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    desc = Phi3().describe(
        {**SIZES, "rope_scaling": scaling, "original_max_position_embeddings": 64}
    )
    assert desc.ropes["rope"].scaling["rope_type"] == "longrope"
    assert desc.ropes["rope"].scaling["original_max_position_embeddings"] == 64


def test_wrong_number_of_factors_is_refused() -> None:
    oracle = Oracle(Phi3Config(**SIZES))
    scaling = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    desc = Phi3().describe({**SIZES, "rope_scaling": scaling})
    with pytest.raises(UnsupportedModel, match="4 numbers"):
        Host(desc, oracle.source)
