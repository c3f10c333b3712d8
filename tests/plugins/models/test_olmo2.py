"""OLMo 2 against transformers: norms after the branches, q and k normalised at full width."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Olmo2Config

from cardcage.core.errors import UnsupportedModel
from cardcage.plugins.models.olmo2 import Olmo2
from tests.support.oracle import Oracle, base, check, check_bfloat16


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 6, "tie_word_embeddings": True, "attention_bias": True}],
    ids=["gqa", "mha-tied-biased"],
)
def test_equals_transformers(changes: dict[str, Any]) -> None:
    check(Oracle(Olmo2Config(**base(**changes))), Olmo2())


def test_bfloat16() -> None:
    check_bfloat16(Oracle(Olmo2Config(**base())), Olmo2())


def test_clipping_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="clip_qkv"):
        Olmo2().describe(base(clip_qkv=6.0))
