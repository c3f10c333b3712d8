"""Philox on ints, numpy and torch; draws against the plain reference; statistics of draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cardcage.core.runtime import rng

ONES = rng.MASK


def test_known_answers_of_philox() -> None:
    assert rng.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    answer = rng.philox((ONES,) * 4, (ONES, ONES))
    assert answer == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_ints_numpy_and_torch_agree_bit_for_bit() -> None:
    generator = np.random.default_rng(1)
    counter = generator.integers(0, 2**32, (4, 50), dtype=np.uint64)
    key = generator.integers(0, 2**32, (2, 50), dtype=np.uint64)
    by_numpy = rng.philox(counter, key)
    by_torch = rng.philox(
        torch.from_numpy(counter.astype(np.int64)), torch.from_numpy(key.astype(np.int64))
    )
    for i in range(50):
        exact = rng.philox(tuple(int(c) for c in counter[:, i]), tuple(int(k) for k in key[:, i]))
        assert exact == tuple(int(w[i]) for w in by_numpy)
        assert exact == tuple(int(w[i]) for w in by_torch)


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 97, 1024])
def test_words_of_rows_and_of_single_ids_agree(vocab: int) -> None:
    seeds = torch.tensor([0, -1, 2**62, -(2**63)])
    positions = torch.tensor([0, 7, 100_000, 2**31])
    dense = rng.words(seeds, positions, vocab)
    ids = torch.arange(vocab)
    for i in range(4):
        single = rng.words_at(seeds[i], positions[i], ids)
        assert torch.equal(dense[i], single)
        seed, position = seeds[i : i + 1].numpy(), positions[i : i + 1].numpy()
        by_numpy = rng.words_at(seed, position, ids.numpy())
        assert np.array_equal(by_numpy, single.numpy())


def test_domains_and_subs_are_other_streams() -> None:
    seed, position = torch.tensor([5]), torch.tensor([9])
    streams = [rng.words(seed, position, 64, d, s) for d in range(4) for s in (0, 1)]
    for i, first in enumerate(streams):
        for second in streams[:i]:
            assert int((first == second).sum()) == 0


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("vocab", [1, 2, 7, 50, 5003])
def test_draw_equals_dense_and_plain_reference(spread: float, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    z = torch.randn(9, vocab, generator=generator) * spread
    if vocab > 3:
        z[:, 1::3] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator)
    positions = torch.randint(0, 2**31, (9,), generator=generator)
    got = rng.draw(z, seeds, positions)
    dense = (z + rng.gumbel(rng.words(seeds, positions, vocab))).argmax(-1)
    assert got.tolist() == dense.tolist()
    for i in range(9):
        plain = rng.draw_numpy(z[i].numpy(), int(seeds[i]), int(positions[i]))
        assert plain == int(got[i])


def test_noise_bounds() -> None:
    extremes = rng.gumbel(torch.tensor([0, ONES]))
    assert extremes[0] <= rng.GUMBEL_MAX
    assert torch.isfinite(extremes).all()
    assert extremes[0] > 22.8  # the top is not quantised away


def test_a_draw_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(64, 3000, generator=generator) * torch.linspace(0.5, 30.0, 64)[:, None]
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    positions = torch.arange(64)
    alone = [int(rng.draw(z[i : i + 1], seeds[i : i + 1], positions[i : i + 1])) for i in range(64)]
    for size in (1, 2, 3, 7, 16, 33, 64):
        assert rng.draw(z[:size], seeds[:size], positions[:size]).tolist() == alone[:size]
    order = torch.randperm(64, generator=generator)
    assert rng.draw(z[order], seeds[order], positions[order]).tolist() == [alone[i] for i in order]


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """The probability of a larger statistic, by the Wilson-Hilferty approximation."""
    kept = p > 0
    expected = p[kept] * counts.sum()
    x, df = float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1
    score = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(score / math.sqrt(2))


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_softmax(over: str) -> None:
    z = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf, 0.5, -3.0, 1.5])
    num = 100_000
    counter = torch.arange(num)
    fixed = torch.full_like(counter, 1234567)
    seeds, positions = (fixed, counter) if over == "positions" else (counter, fixed)
    ids = rng.draw(z.expand(num, -1).contiguous(), seeds, positions).numpy()
    counts = np.bincount(ids, minlength=8)
    assert counts[4] == 0
    assert chi_square(counts, torch.softmax(z, 0).numpy()) > 1e-3


def test_neighbouring_positions_are_not_correlated() -> None:
    z = torch.zeros(50_000, 4)
    counter = torch.arange(50_000)
    ids = rng.draw(z, torch.full_like(counter, 7), counter).numpy()
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) > 1e-3


def test_first_argmax_takes_the_lowest_id() -> None:
    z = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0], [-torch.inf, -torch.inf, -torch.inf]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert rng.first_argmax(z.to(dtype)).tolist() == [1, 0, 0]
