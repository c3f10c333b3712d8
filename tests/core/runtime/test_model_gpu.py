"""Models on a GPU: a step is captured in a graph and replayed on other tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cardcage.core.runtime.layers import ModelInput
from cardcage.core.runtime.model import build_model, load_weights
from cardcage.plugins.models.gemma3 import Gemma3
from cardcage.plugins.models.llama import Llama
from cardcage.plugins.models.olmo2 import Olmo2
from cardcage.plugins.models.qwen3_moe import Qwen3Moe
from tests.support.building import RandomSource, wanted_by
from tests.support.paged import PlainAttention, PlainQuantizer, facts, resolver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}


class Echo(PlainAttention):
    """Attention that needs no cache: q itself."""

    def write(self, k: Any, v: Any, cache: Any, plan: Any) -> None: ...

    def forward(self, q, cache, plan, out=None, sinks=None, lse=None):  # type: ignore[no-untyped-def]
        return q


@pytest.mark.parametrize("features", [(), ("triton",)], ids=["torch", "kernels"])
@pytest.mark.parametrize("plugin", [Llama, Gemma3, Olmo2, Qwen3Moe])
def test_a_step_replays_from_a_graph(plugin: Any, features: tuple[str, ...]) -> None:
    model = build_model(
        plugin().describe(SIZES),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        resolve=resolver(Echo),
        quantizer=PlainQuantizer(),
        block_size=16,
        device_facts=facts("cuda", frozenset(features)),
    )
    load_weights(model, RandomSource(wanted_by(model.weights)))
    assert model.graph_safe
    ids, positions = torch.arange(5, device="cuda"), torch.arange(5, device="cuda")
    inp = ModelInput(ids, positions, [None, None])

    def step() -> torch.Tensor:
        return model.logits(model.forward(inp))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(0, 131, (5,), generator=generator))
        positions.copy_(torch.randint(0, 100, (5,), generator=generator))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())
        assert torch.isfinite(replayed).all()
