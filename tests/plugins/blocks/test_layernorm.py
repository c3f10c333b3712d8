"""Layer norm with and without bias."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from tests.support.building import context, desc, make, step


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_formula(bias: bool, dtype: torch.dtype) -> None:
    ctx = context(desc(hidden=24), dtype)
    block, source = make(Node("layernorm", "norm", {"eps": 1e-3, "bias": bias}), ctx)
    x = (torch.randn(5, 24) * 3 + 1).to(dtype)
    got = block(x, step(ctx, 5))
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    want = want * source.tensors["norm.weight"].double()
    if bias:
        want = want + source.tensors["norm.bias"].double()
    else:
        assert "norm.bias" not in source.tensors
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="center"):
        context().make(Node("layernorm", "norm", {"eps": 1.0, "center": True}))
