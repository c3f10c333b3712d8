"""The gated MLP: activations, biases, fused and separate tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from tests.support.building import context, desc, make, step


def gate(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "swiglu":
        return x * torch.sigmoid(x)
    if name == "geglu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_formula(activation: str, bias: bool, fused: bool) -> None:
    args = {"intermediate_size": 20, "activation": activation, "bias": bias, "fused": fused}
    ctx = context(desc(hidden=12))
    block, source = make(Node("mlp", "m", args), ctx, std=0.5)
    t = source.tensors
    x = torch.randn(7, 12)
    before = x.clone()
    got = block(x, step(ctx, 7))
    assert torch.equal(x, before)
    if fused:
        g, u = F.linear(x, t["m.gate_up_proj.weight"], t.get("m.gate_up_proj.bias")).chunk(2, -1)
    else:
        g = F.linear(x, t["m.gate_proj.weight"], t.get("m.gate_proj.bias"))
        u = F.linear(x, t["m.up_proj.weight"], t.get("m.up_proj.bias"))
    want = F.linear(gate(activation, g) * u, t["m.down_proj.weight"], t.get("m.down_proj.bias"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", [{"activation": "relu"}, {"limit": 7.0}])
def test_mistakes_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match=r"relu|limit"):
        context().make(Node("mlp", "m", {"intermediate_size": 4, **extra}))
