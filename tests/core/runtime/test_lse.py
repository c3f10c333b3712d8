"""The LSE merge equals single-pass attention for any split of the keys, empty sets included."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.runtime.lse import clean, merge

NEG = float("-inf")


def _partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [T, H, D] over the chosen rows of k, v [L, H, D]; no key -> NaN, -inf."""
    num_tokens, num_heads, _ = q.shape
    if len(keys) == 0:
        out = torch.full((num_tokens, num_heads, v.shape[-1]), float("nan"), dtype=q.dtype)
        return out, torch.full((num_heads, num_tokens), NEG, dtype=q.dtype)
    scores = torch.einsum("thd,lhd->htl", q, k[keys])
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("htl,lhd->thd", torch.softmax(scores, -1), v[keys]), lse


@pytest.mark.parametrize("seed", range(5))
def test_any_split_equals_single_pass(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 2, 8, generator=gen, dtype=torch.float64)
    k = torch.randn(17, 2, 8, generator=gen, dtype=torch.float64)
    v = torch.randn(17, 2, 5, generator=gen, dtype=torch.float64)
    owner = torch.randint(0, 6, (17,), generator=gen)
    parts = [_partial(q, k, v, torch.nonzero(owner == p).flatten()) for p in range(8)]
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    want_out, want_lse = _partial(q, k, v, torch.arange(17))
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    outs = torch.full((3, 2, 1, 4), float("nan"))
    lses = torch.tensor([NEG, float("nan"), float("inf")]).view(3, 1, 1).expand(3, 1, 2)
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros(2, 1, 4))
    assert torch.equal(lse, torch.full((1, 2), NEG))


def test_nan_of_a_weightless_piece_is_not_multiplied() -> None:
    outs = torch.stack([torch.full((1, 1, 4), float("nan")), torch.ones(1, 1, 4)])
    out, lse = merge(outs, torch.tensor([NEG, 2.5]).view(2, 1, 1))
    assert torch.equal(out, torch.ones(1, 1, 4))
    assert lse.item() == 2.5


def test_a_very_large_lse_does_not_overflow() -> None:
    outs = torch.stack([torch.zeros(1, 1, 2), torch.ones(1, 1, 2)])
    out, lse = merge(outs, torch.tensor([1e4, 1e4]).view(2, 1, 1))
    assert torch.allclose(out, torch.full((1, 1, 2), 0.5))
    assert lse.item() == pytest.approx(1e4 + 0.6931, rel=1e-6)


def test_low_precision_outputs_are_summed_in_float32() -> None:
    outs = torch.ones(64, 1, 1, 1, dtype=torch.bfloat16)
    out, lse = merge(outs, torch.zeros(64, 1, 1))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.item() == 1.0


def test_clean_keeps_numbers() -> None:
    lse = torch.tensor([0.0, -3.0, NEG, float("inf"), float("nan")])
    assert clean(lse).tolist() == [0.0, -3.0, NEG, NEG, NEG]
