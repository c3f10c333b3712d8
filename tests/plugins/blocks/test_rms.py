"""RMS norm: three roundings, each bit for bit where the model's dtype is narrow."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.plugins.blocks._norms import RMS_VARIANTS, rms_reference
from tests.support.building import context, desc, make, step


def node(variant: str, eps: float = 1e-5) -> Node:
    return Node("rms", "norm", {"eps": eps, "variant": variant})


@pytest.mark.parametrize("variant", RMS_VARIANTS)
@pytest.mark.parametrize("n", [1, 7, 64, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_formula(variant: str, n: int, dtype: torch.dtype) -> None:
    ctx = context(desc(hidden=n), dtype)
    block, source = make(node(variant), ctx)
    x = torch.randn(5, n).to(dtype)
    before = x.clone()
    got = block(x, step(ctx, 5))
    want = rms_reference(x, source.tensors["norm.weight"], 1e-5, variant)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    else:
        # The rounding is the variant; a last-place difference in the mean may flip few values.
        assert (got != want).float().mean() < 0.02
        torch.testing.assert_close(got, want)


def test_variants_differ() -> None:
    """Otherwise the test above would not tell them apart."""
    x, w = torch.randn(64, 64).bfloat16(), torch.randn(64)
    results = [rms_reference(x, w, 1e-5, variant) for variant in RMS_VARIANTS]
    for i, a in enumerate(results):
        for b in results[i + 1 :]:
            assert (a != b).float().mean() > 0.05


def test_eps_is_inside_the_root() -> None:
    ctx = context(desc(hidden=4))
    block, source = make(node("llama", eps=0.5), ctx)
    got = block(torch.zeros(1, 4), step(ctx, 1))
    assert torch.equal(got, torch.zeros(1, 4))
    got = block(torch.ones(1, 4), step(ctx, 1))
    torch.testing.assert_close(got[0], source.tensors["norm.weight"] / 1.5**0.5)


def test_mistakes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="sideways"):
        context().make(node("sideways"))
    with pytest.raises(UnsupportedModel, match="colour"):
        context().make(Node("rms", "norm", {"eps": 1.0, "colour": "red"}))
