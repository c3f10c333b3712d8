"""Thresholds of top-k and top-p against a sort, on both ways of finding them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardcage.core.runtime import truncate


def reference(row: np.ndarray, k: int, p: float) -> float:
    """The smallest kept value by sorting; ties count together."""
    ranked = np.sort(row.astype(np.float64))[::-1]
    threshold = ranked[k - 1] if 0 < k < len(row) else -np.inf
    if p < 1:
        left = ranked[ranked >= threshold]
        mass = np.exp(left - left[0])
        threshold = left[
            min(np.searchsorted(np.cumsum(mass) / mass.sum(), p - 1e-12), len(left) - 1)
        ]
    return float(threshold)


def cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = np.random.default_rng(0)
    out = []
    for case in range(80):
        vocab, rows = int(generator.integers(2, 300)), int(generator.integers(1, 5))
        z = generator.standard_normal((rows, vocab)) * generator.choice([0.1, 1, 5, 30])
        z = np.round(z) if case % 3 == 0 else z
        z = np.zeros_like(z) if case % 17 == 0 else z
        if case % 5 == 0:
            z[:, 0] = -np.inf
        k = generator.integers(0, vocab + 3, rows)
        p = generator.choice([1, 0.1, 0.5, 0.9, 0.999, 1e-6], rows)
        out.append(
            (
                torch.tensor(z, dtype=torch.float32),
                torch.tensor(k),
                torch.tensor(p, dtype=torch.float32),
            )
        )
    return out


@pytest.mark.parametrize("way", [truncate.thresholds, truncate.bisect])
def test_thresholds_equal_a_sort(way) -> None:
    for z, k, p in cases():
        got = way(z, k, p)
        for i in range(len(z)):
            wanted = reference(z[i].numpy(), int(k[i]), float(p[i]))
            assert float(got[i]) == pytest.approx(wanted, abs=1e-6), (z[i], k[i], p[i])


def test_host_and_device_ways_are_bitwise_equal() -> None:
    for z, k, p in cases():
        assert torch.equal(truncate.thresholds(z, k, p), truncate.bisect(z, k, p))


@pytest.mark.parametrize("way", [truncate.thresholds, truncate.bisect])
def test_kept_mass_is_enough_and_minimal(way) -> None:
    z = torch.randn(6, 500, generator=torch.Generator().manual_seed(2)) * 3
    p = torch.tensor([0.1, 0.3, 0.5, 0.8, 0.95, 0.999])
    bound = way(z, torch.zeros(6, dtype=torch.int64), p)
    mass = torch.softmax(z.double(), -1)
    for i in range(6):
        kept = z[i] >= bound[i]
        assert mass[i][kept].sum() >= p[i] - 1e-9
        assert mass[i][z[i] > bound[i]].sum() < p[i]


@pytest.mark.parametrize("way", [truncate.thresholds, truncate.bisect])
def test_ties_at_the_boundary_all_stay(way) -> None:
    z = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert way(z, torch.tensor([2]), torch.tensor([1.0])).tolist() == [1.0]
    assert way(z, torch.tensor([0]), torch.tensor([0.8])).tolist() == [1.0]
    zeros = torch.tensor([[0.0, -0.0, -1.0]])
    assert way(zeros, torch.tensor([1]), torch.tensor([1.0])).tolist() == [0.0]


@pytest.mark.parametrize("way", [truncate.thresholds, truncate.bisect])
def test_neutral_and_hopeless_rows(way) -> None:
    z = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]])
    off = way(z, torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))
    assert off.tolist() == [-torch.inf, -torch.inf]
    hopeless = way(z, torch.tensor([1, 1]), torch.tensor([0.5, 0.5]))
    assert hopeless.tolist() == [2.0, -torch.inf]


def test_a_row_does_not_depend_on_its_batch() -> None:
    z = torch.randn(32, 700, generator=torch.Generator().manual_seed(4)) * 2
    k = torch.arange(32) * 3
    p = torch.linspace(0.05, 1.0, 32)
    for way in (truncate.thresholds, truncate.bisect):
        together = way(z, k, p)
        for i in range(32):
            assert torch.equal(way(z[i : i + 1], k[i : i + 1], p[i : i + 1]), together[i : i + 1])
