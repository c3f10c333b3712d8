"""The Triton draw and thresholds against torch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from cardcage.core.runtime import rng, sampling_kernels, truncate

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_rows(n: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    ("vocab", "spread"), [(1, 1.0), (3, 1.0), (64, 0.1), (65, 5.0), (203, 2.0)]
)
def test_draw_takes_the_ids_of_torch(vocab: int, spread: float) -> None:
    z = random_rows(4, vocab, spread)
    if vocab > 3:
        z[:, ::3] = -torch.inf
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator)
    positions = torch.randint(0, 2**32, (4,), generator=generator)
    for domain, sub in ((0, 0), (2, 77)):
        want = rng.draw(z, seeds, positions, domain, sub)
        on = [x.to(DEVICE) for x in (z, seeds, positions)]
        got = sampling_kernels.draw(*on, domain, sub, block=16)
        assert got.tolist() == want.tolist()


def test_noise_is_exact_at_both_ends() -> None:
    """With flat logits the winner is the smallest word, so every bit of it matters."""
    z = torch.zeros(8, 500)
    seeds, positions = torch.arange(8) * 10**12, torch.arange(8)
    lowest = rng.words(seeds, positions, 500).argmin(dim=-1)
    got = sampling_kernels.draw(z.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), block=64)
    assert got.tolist() == lowest.tolist()


def test_draw_of_hopeless_and_no_rows() -> None:
    z = torch.full((1, 70), -torch.inf, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert 0 <= int(sampling_kernels.draw(z, zero, zero, block=16)) < 70
    assert sampling_kernels.draw(z[:0], zero[:0], zero[:0]).shape == (0,)


@pytest.mark.parametrize(("vocab", "spread"), [(2, 1.0), (31, 20.0), (100, 0.5)])
def test_thresholds_equal_torch(vocab: int, spread: float) -> None:
    z = random_rows(6, vocab, spread, vocab)
    z[1] = z[1].round()
    z[2] = 0.0
    z[3, : vocab // 2] = -torch.inf
    z[4] = -torch.inf
    k = torch.tensor([3, 2, 1, 0, 2, vocab + 1], dtype=torch.int32)
    p = torch.tensor([1.0, 0.6, 0.3, 0.9, 0.5, 0.999])
    want = truncate.bisect(z, k, p)
    got = sampling_kernels.thresholds(z.to(DEVICE), k.to(DEVICE), p.to(DEVICE), block=64).cpu()
    for i in range(6):
        assert torch.equal(z[i] >= got[i], z[i] >= want[i]), i


def test_other_layouts_are_refused() -> None:
    z = torch.zeros(4, 4)
    zero = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="float32"):
        sampling_kernels.draw(z.half(), zero, zero)
    with pytest.raises(ValueError, match="contiguous"):
        sampling_kernels.thresholds(z.T[:, :3].T.contiguous().T, zero.int(), zero.float())
