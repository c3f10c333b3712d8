"""The fixed workloads that Cardcage is measured on, so that figures can be compared over time.

C1 to C5 run the embedded model on a CPU; prompts are slices of Newton's *Opticks* as token ids
(`data/corpus.u16`, little-endian uint16). W1 to W4 run real shapes with random weights on a GPU.
Everything is greedy and ignores end of sequence, so the number of output tokens is fixed.

A workload is a list of waves; a wave is a list of (prompt token ids, max tokens).
"""

from __future__ import annotations

import array
import random
from pathlib import Path

Wave = list[tuple[list[int], int]]
GPU_VOCAB = 10_000
_CORPUS = Path(__file__).parent / "data" / "corpus.u16"


def _corpus() -> array.array[int]:
    ids = array.array("H")
    ids.frombytes(_CORPUS.read_bytes())
    return ids


def _slice(rng: random.Random, ids: array.array[int], length: int) -> list[int]:
    start = rng.randrange(0, len(ids) - length)
    return list(ids[start : start + length])


def c1() -> list[Wave]:
    """One stream: 64 tokens in, 128 out."""
    return [[(_slice(random.Random(1), _corpus(), 64), 128)]]


def c2() -> list[Wave]:
    """Offline throughput: 32 requests, 32-256 in, 32-128 out."""
    rng, ids = random.Random(0), _corpus()
    lengths = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(32)]
    return [[(_slice(rng, ids, n_in), n_out) for n_in, n_out in lengths]]


def c3() -> list[Wave]:
    """Prefill: 1,024 in, 1 out."""
    return [[(_slice(random.Random(3), _corpus(), 1024), 1)]]


def c4() -> list[Wave]:
    """Shared prefix: two waves of 16 requests on one 768-token prefix, 32 own tokens, 32 out."""
    rng, ids = random.Random(4), _corpus()
    prefix = _slice(rng, ids, 768)
    return [[(prefix + _slice(rng, ids, 32), 32) for _ in range(16)] for _ in range(2)]


def c5() -> list[Wave]:
    """Server load: 64 requests of 64 in, 64 out, for 16 closed-loop clients."""
    rng, ids = random.Random(5), _corpus()
    return [[(_slice(rng, ids, 64), 64) for _ in range(64)]]


def _salted(prompts: list[list[int]], salt: int) -> list[list[int]]:
    """The same lengths with other ids, so that no earlier repetition serves a prefix hit."""
    if not salt:
        return prompts
    return [[(t + 37 * salt) % (GPU_VOCAB + 1) for t in p] for p in prompts]


def w1(salt: int = 0) -> list[Wave]:
    """Offline throughput: 256 requests of 100-1,024 in and out (133,966 output tokens)."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, GPU_VOCAB) for _ in range(rng.randint(100, 1024))] for _ in range(256)
    ]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return [list(zip(_salted(prompts, salt), outputs, strict=True))]


def _fixed(batch: int, n_in: int, n_out: int, salt: int, seed: int) -> list[Wave]:
    rng = random.Random(f"fixed-{seed}-{batch}-{n_in}")
    prompts = [[rng.randint(0, GPU_VOCAB) for _ in range(n_in)] for _ in range(batch)]
    return [[(p, n_out) for p in _salted(prompts, salt)]]


def w2(batch: int, salt: int = 0, n_out: int = 256) -> list[Wave]:
    """Decode latency: batch 1 on 128 tokens, other batches on 512; 256 out."""
    return _fixed(batch, 128 if batch == 1 else 512, n_out, salt, seed=2)


def w3(salt: int = 0) -> list[Wave]:
    """Time to first token: one prompt of 8,192, one token out."""
    return _fixed(1, 8192, 1, salt, seed=3)


def w4(salt: int = 0) -> list[Wave]:
    """Prefix cache: two waves of 64 requests on one 4,096-token prefix, 64 own, 64 out."""
    rng = random.Random("w4-prefix")
    prefix = [rng.randint(0, GPU_VOCAB) for _ in range(4096)]
    waves: list[Wave] = []
    for wave in range(2):
        tail = random.Random(f"w4-tail-{wave}")
        prompts = [prefix + [tail.randint(0, GPU_VOCAB) for _ in range(64)] for _ in range(64)]
        waves.append([(p, 64) for p in _salted(prompts, salt)])
    return waves
