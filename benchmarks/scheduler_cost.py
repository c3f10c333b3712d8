"""Host cost of one steady decode step: scheduler alone, and the whole engine with outputs.

    python benchmarks/scheduler_cost.py [--steps 300] [--running 1 64 256 1024]

No model runs: results are made up, so the figures are what the host adds to every step. The aim is
200 us for schedule + commit at 256 running requests. Needs no torch.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from cardcage.core.engine import Engine
from cardcage.core.scheduler import Scheduler, SchedulerConfig
from cardcage.core.torture import plugin_kinds
from cardcage.core.types import (
    KVCapacity,
    KVGroupSpec,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
)

GROUPS = {
    "full": (KVGroupSpec("full", "full", 16, 1 << 16),),
    "hybrid": (
        KVGroupSpec("full", "full", 16, 1 << 14),
        KVGroupSpec("window", "window", 16, 1 << 16, {"window": 512}),
    ),
}


class _NoDevice:
    """Answers every plan at once with token 1."""

    max_in_flight = 2

    def execute(self, plan: StepPlan) -> _NoDevice:
        rows = plan.num_rows
        counts = plan.samples.astype(np.int32)
        self.results.append(
            StepResult(plan.step, np.ones((rows, 1), np.int32), counts, np.zeros(rows, np.int32))
        )
        return self

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.results.pop(0)


def _setup(running: int, groups: tuple[KVGroupSpec, ...], steps: int) -> tuple[Engine, Scheduler]:
    length = 200 + 3 * steps
    pages = sum(g.page_bytes for g in groups) * (length // 16 + 2) * running + (1 << 20)
    capacity = KVCapacity(groups, 2 * pages, running, length)
    config = SchedulerConfig(
        max_num_batched_tokens=8192, max_num_seqs=running, max_model_len=length
    )
    kinds = [plugin_kinds()(group) for group in groups]
    scheduler = Scheduler(config, capacity, kinds, time.monotonic)
    engine = Engine(scheduler, _NoDevice(), time.monotonic)
    for index in range(running):
        prompt = [(index * 7919 + i) % 1000 for i in range(100 + index % 16)]
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=3 * steps),
                eos_token_ids=(0,),
            )
        )
    while scheduler.waiting or scheduler.stats().generation_tokens < running:
        engine.step()
    return engine, scheduler


def measure(running: int, groups: tuple[KVGroupSpec, ...], steps: int) -> tuple[float, float]:
    """Microseconds of CPU time of (schedule + commit, engine.step): median of `steps` steps."""
    engine, scheduler = _setup(running, groups, steps)
    device = engine.executor
    while engine._in_flight:  # let the pipeline run dry
        engine._in_flight.popleft()
        scheduler.commit(device.results.pop(0))
    alone = []
    for _ in range(steps):
        began = time.thread_time()
        plan = scheduler.schedule()
        middle = time.thread_time()
        device.execute(plan)
        result = device.results.pop(0)
        again = time.thread_time()
        scheduler.commit(result)
        alone.append(time.thread_time() - again + middle - began)
    whole = []
    for _ in range(steps):
        began = time.thread_time()
        engine.step()
        whole.append(time.thread_time() - began)
    return float(np.median(alone)) * 1e6, float(np.median(whole)) * 1e6


def main() -> None:
    """Print one line per batch size and kind of model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, nargs="*", default=[1, 64, 256, 1024])
    args = parser.parse_args()
    print(f"{'model':8} {'running':>8} {'schedule+commit us':>20} {'engine.step us':>16}")
    for name, groups in GROUPS.items():
        for running in args.running:
            alone, whole = measure(running, groups, args.steps)
            print(f"{name:8} {running:8d} {alone:20.1f} {whole:16.1f}")


if __name__ == "__main__":
    main()
