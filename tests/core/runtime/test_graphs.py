"""The captured decode step: the same function on padded static buffers equals the eager step."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.runtime.batch import BatchState
from cardcage.core.runtime.graphs import LARGEST, GraphRunner, default_sizes
from cardcage.core.runtime.kv_pool import KVPool
from cardcage.core.runtime.model_runner import ModelRunner
from cardcage.core.runtime.sampler import Sampler
from cardcage.core.types import SamplingParams, StepResult
from tests.support.fake_model import Driver, FakeModel, Live

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8)
CUT = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)
LISTS = SamplingParams(temperature=0.8, logit_bias={4: 3.0}, frequency_penalty=0.5, logprobs=2)


def make(sizes: tuple[int, ...] | None) -> tuple[ModelRunner, Driver, GraphRunner | None]:
    model = FakeModel()
    groups = model.kv_groups()
    pool = KVPool(groups, 600 * groups[0].page_bytes, CPU)
    pool.buffer[groups[0].page_bytes :].fill_(255)  # NaN wherever nothing was written
    batch = BatchState(12, 64, model.vocab, groups, CPU)
    runner = ModelRunner(model, pool, batch, Sampler(batch))
    graphs = None if sizes is None else GraphRunner(runner, 12, sizes, capture=False)
    return runner, Driver(2), graphs


def serve(
    sizes: tuple[int, ...] | None, params: list[SamplingParams], num: int
) -> tuple[list[list[int]], list[StepResult], GraphRunner | None]:
    """Prefill every request in one step, then decode all of them together."""
    runner, driver, graphs = make(sizes)
    lives: list[Live] = []
    admits = []
    for i, p in enumerate(params):
        prompt = [(7 * i + j) % 48 for j in range(3 + i)]
        live, admit = driver.admit((5 * i) % 12, prompt, params=p, seed=i)
        lives.append(live)
        admits.append(admit)
    steps = [runner.step(driver.plan([(v, len(v.tokens), True) for v in lives], admits))]
    steps += [runner.step(driver.plan([(v, 1, True) for v in lives])) for _ in range(num)]
    results = [step.result() for step in steps]
    return [[int(r.token_ids[i, 0]) for r in results] for i in range(len(params))], results, graphs


@pytest.mark.parametrize("params", [
    [GREEDY], [GREEDY] * 5, [RANDOM, GREEDY, RANDOM], [CUT, GREEDY, RANDOM, CUT],
    [LISTS, CUT, GREEDY, RANDOM, LISTS],
], ids=["one", "greedy", "random", "truncated", "lists"])  # fmt: skip
@pytest.mark.parametrize("sizes", [(8,), (1, 2, 4, 8), (5,)])
def test_padded_static_step_equals_eager(params, sizes) -> None:
    eager, plain, _ = serve(None, params, 6)
    static, results, graphs = serve(sizes, params, 6)
    assert static == eager
    assert graphs is not None
    assert graphs.stats.replays == 6
    for a, b in zip(plain, results):
        assert a.logprobs == b.logprobs
        assert a.errors == b.errors == {}


def test_padding_writes_no_cache() -> None:
    runner, driver, _ = make((8,))
    live, admit = driver.admit(3, [1, 2, 3])
    runner.step(driver.plan([(live, 3, True)], [admit])).result()
    before = runner.pool.buffer.clone()
    runner.step(driver.plan([(live, 1, True)])).result()
    changed = (runner.pool.buffer != before).nonzero()[:, 0]
    page = runner.pool.groups[0].page_bytes
    blocks = {int(b) // page for b in changed}
    assert blocks <= {live.blocks[0][0], live.blocks[1][0]}


def test_what_does_not_fit_runs_eagerly() -> None:
    runner, driver, graphs = make((2,))
    assert graphs is not None
    lives, admits = zip(*(driver.admit(i, [i, 4]) for i in range(3)))
    runner.step(driver.plan([(v, 2, True) for v in lives], list(admits))).result()
    runner.step(driver.plan([(v, 1, True) for v in lives])).result()  # three rows, at most two
    runner.step(driver.plan([(lives[0], 1, False)])).result()  # a row that is not sampled
    assert graphs.stats.replays == 0
    runner.step(driver.plan([(lives[1], 1, True)])).result()
    assert graphs.stats.replays == 1
    assert "1 replays" in graphs.report()
    graphs.close()
    runner.step(driver.plan([(lives[1], 1, True)])).result()
    assert graphs.stats.replays == 1


def test_sizes() -> None:
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(8) == (1, 2, 4, 8)
    assert default_sizes(10_000)[-1] == LARGEST
    for top in (1, 7, 100, 300, 512, 1024):
        sizes = default_sizes(top)
        assert sizes[-1] == min(top, LARGEST)
        assert list(sizes) == sorted(set(sizes))
        assert len(sizes) < 25
