"""Counter-based random numbers: a draw is a pure function of (seed, position, domain, token id).

Nothing here keeps state, so a draw does not depend on batch-mates, chunking, order, preemption
or padding. The generator is Philox4x32-10 with key (seed low, seed high) and counter
(token >> 2, position, domain, sub); the word `token & 3` is that token's. `philox` runs on
Python ints, numpy arrays and torch tensors alike and is exact on all of them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Result = TypeVar("Result")

TARGET, ACCEPT, DRAFT, ROUTE = range(4)

MASK = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)
_STEP = (0x9E3779B9, 0xBB67AE85)
_TOP = 1.0 - 2.0**-24  # largest uniform below 1 in float32
# Bounds of the Gumbel noise below: -log(-log1p(-2**-33)) and its counterpart at _TOP.
GUMBEL_MAX = 22.8739
# A candidate costs one Philox call, a dense row a quarter of one per token.
_SPARSE = 5
# Below this vocabulary a loop over rows costs more than noise for every token.
_SMALL = 1024


def philox(counter: Any, key: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32.

    Args:
        counter: Four values in [0, 2**32): ints, numpy int64/uint64 arrays or torch int64
            tensors, freely mixed and broadcast.
        key: Two such values.

    Returns:
        Four values in [0, 2**32), each of the broadcast shape of what it depends on.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Signed 64-bit products wrap; the masks take the same 32 bits as unsigned ones would.
        low = c0 * _MUL[0]
        high = c2 * _MUL[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & MASK) ^ (c1 ^ k0),
            high & MASK,
            ((low >> 32) & MASK) ^ (c3 ^ k1),
            low & MASK,
        )
        k0 = (k0 + _STEP[0]) & MASK
        k1 = (k1 + _STEP[1]) & MASK
    return c0, c1, c2, c3


def words(
    seeds: torch.Tensor, positions: torch.Tensor, num: int, domain: int = TARGET, sub: int = 0
) -> torch.Tensor:
    """The words of ids 0..num for each row: int64 [n, num] in [0, 2**32).

    Args:
        seeds: int64 [n].
        positions: int64 [n], in [0, 2**32).
    """
    n = seeds.shape[0]
    quads = (num + 3) // 4
    c0 = torch.arange(quads, device=seeds.device)
    key = ((seeds & MASK)[:, None], ((seeds >> 32) & MASK)[:, None])
    out = philox((c0[None], positions[:, None], domain, sub), key)
    return torch.stack(out, dim=-1).view(n, quads * 4)[:, :num]


def words_at(seeds: Any, positions: Any, ids: Any, domain: int = TARGET, sub: int = 0) -> Any:
    """The word of one id for each entry; numpy arrays or torch tensors (int64 [m])."""
    key = (seeds & MASK, (seeds >> 32) & MASK)
    w0, w1, w2, w3 = philox((ids >> 2, positions, domain, sub), key)
    lane = ids & 3
    where: Any = torch.where if isinstance(ids, torch.Tensor) else np.where
    return where(lane < 2, where(lane == 0, w0, w1), where(lane == 2, w2, w3))


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """Gumbel noise in float32 from words (any shape): -log(-log1p(-u)), u = (word + 1/2) / 2**32.

    Small u gives large noise, so float32 is densest exactly where a maximum is decided.
    """
    return gumbel_(word.to(torch.float32))


def gumbel_(word: torch.Tensor) -> torch.Tensor:
    """`gumbel` in place on words that are float32 already."""
    u = word.add_(0.5).mul_(2.0**-32).clamp_(max=_TOP)
    return u.neg_().log1p_().neg_().log_().neg_()


@cache
def has_triton() -> bool:
    """Whether the kernels of `sampling_kernels` can be imported."""
    return find_spec("triton") is not None


def first_argmax(z: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest entry: z [n, V] -> int64 [n]. NaN counts as largest.

    numpy's search takes a tenth of torch's time on a host (16 x 49,152 float32: 0.1 against
    1.1 ms on one core of a Xeon at 2.8 GHz, 2026-12).
    """
    if z.device.type == "cpu" and z.dtype == torch.float32:
        return torch.from_numpy(z.numpy().argmax(axis=1).astype(np.int64))
    return z.argmax(dim=-1)


def draw(
    z: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    domain: int = TARGET,
    sub: int = 0,
) -> torch.Tensor:
    """One exact sample of softmax(z) per row: argmax(z + noise), ties to the lowest id.

    Args:
        z: float32 [n, V], contiguous rows; -inf excludes a token.
        seeds: int64 [n].
        positions: int64 [n], the position of the row that predicts.

    Returns:
        int64 [n]. A row without a finite entry gets some id: the caller must check for that.
    """
    if z.device.type == "cpu" and z.shape[1] > _SMALL:
        rows = list(z.numpy())
        ids = draw_rows(rows, [-np.inf] * len(rows), seeds.numpy(), positions.numpy(), domain, sub)
        return torch.from_numpy(ids)
    if z.device.type != "cpu" and has_triton():
        from cardcage.core.runtime import sampling_kernels

        return sampling_kernels.draw(z, seeds, positions, domain, sub)
    noise = gumbel(words(seeds, positions, z.shape[1], domain, sub))
    return first_argmax(z + noise)


def draw_rows(
    rows: Sequence[NDArray[np.float32]],
    lows: Sequence[float],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    domain: int = TARGET,
    sub: int = 0,
) -> NDArray[np.int64]:
    """`draw` for host memory, among the entries of row i that are at least lows[i].

    Only tokens that can still win get noise: it is bounded, so no token more than GUMBEL_MAX
    below the score of the likeliest one can. The ids are those of the dense way.
    """
    tops = np.array([row.argmax() for row in rows])
    best = np.array([row[top] for row, top in zip(rows, tops)], np.float32)
    score = best + gumbel(torch.from_numpy(words_at(seeds, positions, tops, domain, sub))).numpy()
    # 1e-3 covers the rounding of the subtraction for any logit below 2**13.
    bounds = np.maximum(score - np.float32(GUMBEL_MAX + 1e-3), np.asarray(lows, np.float32))
    out = tops.astype(np.int64)
    few: list[tuple[int, NDArray[np.int64]]] = []
    many: list[int] = []
    for i, row in enumerate(rows):
        if not np.isfinite(best[i]):
            continue
        ids = np.flatnonzero(row >= bounds[i])
        if len(ids) * _SPARSE < len(row):
            few.append((i, ids))
        else:
            many.append(i)

    def dense(i: int) -> int:
        noise = _dense_row(len(rows[i]), int(seeds[i]), int(positions[i]), domain, sub)
        noise += rows[i]
        if lows[i] > -np.inf:
            noise[rows[i] < lows[i]] = -np.inf
        return int(noise.argmax())

    out[many] = on_threads(dense, many)
    if few:
        row = np.concatenate([np.full(len(ids), i) for i, ids in few])
        ids = np.concatenate([ids for _, ids in few])
        word = words_at(seeds[row], positions[row], ids, domain, sub)
        scores = gumbel(torch.from_numpy(word)).numpy()
        scores += np.concatenate([rows[i][ids] for i, ids in few])
        at = 0
        for i, ids in few:
            out[i] = ids[scores[at : at + len(ids)].argmax()]
            at += len(ids)
    return out


@cache
def _threads(num: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num, thread_name_prefix="cardcage-sample")


def on_threads(work: Callable[[int], Result], items: Sequence[int]) -> list[Result]:
    """work(i) of each item, on as many threads as torch uses: numpy's loops release the lock."""
    num = min(torch.get_num_threads(), len(items))
    if num < 2:
        return [work(item) for item in items]
    return list(_threads(torch.get_num_threads()).map(work, items))


def _dense_row(vocab: int, seed: int, position: int, domain: int, sub: int) -> NDArray[np.float32]:
    """Noise of a whole row, float32 [vocab]: `philox` in place, three times as fast on a CPU.

    One row at a time keeps the six buffers in the second-level cache (12,288 counters: 0.6 MiB).
    """
    quads = (vocab + 3) // 4
    # Counter words 1 to 3 are equal in the whole row, so round one needs one product.
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    low, high = np.empty((2, quads), np.uint64)
    np.multiply(np.arange(quads, dtype=np.uint64), np.uint64(_MUL[0]), out=low)
    wide = domain * _MUL[1]
    c0 = np.full(quads, (wide >> 32) ^ position ^ k0, np.uint64)
    c1 = np.full(quads, wide & MASK, np.uint64)
    c2, c3 = np.empty((2, quads), np.uint64)
    np.right_shift(low, np.uint64(32), out=c2)
    np.bitwise_xor(c2, np.uint64(sub ^ k1), out=c2)
    np.bitwise_and(low, np.uint64(MASK), out=c3)
    for _ in range(9):
        k0, k1 = (k0 + _STEP[0]) & MASK, (k1 + _STEP[1]) & MASK
        np.multiply(c0, np.uint64(_MUL[0]), out=low)
        np.multiply(c2, np.uint64(_MUL[1]), out=high)
        np.right_shift(high, np.uint64(32), out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, np.uint64(k0), out=c0)
        np.right_shift(low, np.uint64(32), out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, np.uint64(k1), out=c2)
        np.bitwise_and(high, np.uint64(MASK), out=c1)
        np.bitwise_and(low, np.uint64(MASK), out=c3)
    word = torch.empty(quads, 4)
    for lane, values in enumerate((c0, c1, c2, c3)):
        word[:, lane] = torch.from_numpy(values.view(np.int64))
    return gumbel_(word.view(-1)[:vocab]).numpy()


def draw_numpy(
    z: NDArray[np.float32], seed: int, position: int, domain: int = TARGET, sub: int = 0
) -> int:
    """The same draw for one row in plain numpy: the reference that tests and detectors use.

    Args:
        z: float32 [V].
    """
    ids = np.arange(len(z), dtype=np.uint64)
    key = (seed & MASK, (seed >> 32) & MASK)
    lanes = np.stack(philox((ids >> np.uint64(2), position, domain, sub), key))
    word = lanes[(ids & np.uint64(3)).astype(np.int64), np.arange(len(z))]
    u = (word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.minimum(u, np.float32(_TOP))
    return int(np.argmax(z - np.log(-np.log1p(-u))))
