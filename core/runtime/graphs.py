"""Whole decode steps as replayable graphs: from token gather to commit.

A graph is captured for a number of rows and for the sampling stages in it, the first time that
such a step comes. Its inputs are two persistent buffers, `slots` and `starts`; everything else
comes from the batch tables, whose addresses never change. Rows beyond the step's own point at
the null slot: they read the zeros of the null block and write nothing. A step whose rows need
more than the parameter table (lists of ids, penalties, log-probabilities) replays the graph up
to its logits and samples outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cardcage.core.runtime.model_runner import ModelRunner, Prepared, Replayed, Verified
from cardcage.core.runtime.sample_plan import SamplePlan
from cardcage.core.runtime.sampler import CAPTURABLE, SHAPING
from cardcage.core.runtime.slot_params import Feature

# Steps with more rows run eagerly: there the launches no longer dominate.
LARGEST = 512
# The sampler stages that a graph may hold: greedy, plain random, random with truncation.
_VARIANTS = (Feature(0), Feature.RANDOM | Feature.TEMPERATURE, Feature.RANDOM | SHAPING)


def default_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 128, every 64 up to 512, and the largest.

    Padding costs at most a quarter of the rows above 4; the count of graphs stays below 25.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(192, LARGEST + 1, 64)]
    top = min(max_rows, LARGEST)
    return (*(s for s in sizes if s < top), top)


def graph_bytes(max_rows: int, vocab_size: int) -> int:
    """An estimate of what captured graphs take beside an eager step, in bytes.

    The logits dominate: in the model's dtype, in float32, and once more masked, for the largest
    size; the shared memory pool serves all sizes with it.
    """
    return min(max_rows, LARGEST) * vocab_size * 12


@dataclass(slots=True)
class Buffers:
    """Persistent inputs and outputs of the decode step of one size."""

    slots: torch.Tensor  # int64 [B]
    starts: torch.Tensor  # int64 [B]
    ones: torch.Tensor  # int32 [B]: every row emits one token
    logits: torch.Tensor | None = None  # [B, V], when sampling is outside
    emitted: torch.Tensor | None = None  # int32 [2, B]: tokens, status
    replay: Callable[[], None] | None = None


@dataclass(slots=True)
class _Key:
    size: int
    stages: int  # Feature bits inside the graph, -1 for "ends at the logits"

    def __hash__(self) -> int:
        return hash((self.size, self.stages))


@dataclass(slots=True)
class Stats:
    """Counters for `explain`."""

    captured: int = 0
    replays: int = 0
    bytes: int = 0
    sizes: set[int] = field(default_factory=set)


class GraphRunner:
    """Gives a `ModelRunner` its `replay`.

    Args:
        runner: the runner whose uniform steps are replayed.
        max_rows: most rows of a step.
        sizes: numbers of rows to capture for; `default_sizes` if None.
        capture: False runs the same function on the same padded buffers without a graph, which
            is how hosts test it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        sizes: Sequence[int] | None = None,
        capture: bool = True,
    ) -> None:
        self.sizes = tuple(sorted(sizes or default_sizes(max_rows)))
        self.stats = Stats()
        self._runner = runner
        self._capture = capture
        self._buffers: dict[_Key, Buffers] = {}
        self._pool: Any = None
        self._backend: Any = None
        if capture:
            self._backend = torch.get_device_module(runner.batch.device)
            self._pool = self._backend.graph_pool_handle()
        runner.replay = self.run

    def report(self) -> str:
        """One sentence for `explain`."""
        return (
            f"on for decode steps of up to {self.sizes[-1]} rows: {self.stats.captured} captured "
            f"({self.stats.bytes / 2**20:.0f} MiB), {self.stats.replays} replays"
        )

    def close(self) -> None:
        """Drop all graphs."""
        self._buffers.clear()
        self._runner.replay = None

    def run(self, prepared: Prepared, dev: dict[str, torch.Tensor]) -> Replayed | None:
        """What the step left, or None if no captured shape fits and it must run eagerly."""
        layout, plan = prepared.layout, prepared.sampling
        rows = layout.num_rows
        if not layout.uniform or prepared.prompts or rows > self.sizes[-1]:
            return None
        size = next(s for s in self.sizes if s >= rows)
        inside = self._stages(plan)
        buffers = self._get(_Key(size, -1 if inside is None else int(inside)))
        buffers.slots[:rows].copy_(dev["slots"])
        buffers.slots[rows:].fill_(self._runner.batch.num_slots)
        buffers.starts[:rows].copy_(dev["starts"])
        buffers.starts[rows:].zero_()
        self.stats.replays += 1
        if buffers.replay is None:
            self._body(buffers, inside)
        else:
            buffers.replay()
        if inside is None:
            assert buffers.logits is not None
            return Replayed(logits=buffers.logits[:rows])
        assert buffers.emitted is not None
        # A copy: the next replay may come before this one's tokens have been downloaded.
        tokens, status = buffers.emitted[:, :rows].clone()
        return Replayed(Verified(tokens[:, None], buffers.ones[:rows], status))

    def _stages(self, plan: SamplePlan) -> Feature | None:
        """The smallest captured set of stages that covers the step; None to sample outside."""
        if plan.union & ~CAPTURABLE:
            return None
        return next(v for v in _VARIANTS if not plan.union & ~v)

    def _get(self, key: _Key) -> Buffers:
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = self._new(key)
        return found

    def _new(self, key: _Key) -> Buffers:
        batch = self._runner.batch
        slots = torch.full((key.size,), batch.num_slots, dtype=torch.int64, device=batch.device)
        ones = torch.ones(key.size, dtype=torch.int32, device=batch.device)
        buffers = Buffers(slots, torch.zeros_like(slots), ones)
        self.stats.sizes.add(key.size)
        if self._capture:
            self._record(buffers, None if key.stages < 0 else Feature(key.stages))
        return buffers

    def _body(self, buffers: Buffers, stages: Feature | None) -> None:
        """The decode step as a function of persistent tensors only; no host sync, fixed shapes."""
        batch, size = self._runner.batch, len(buffers.slots)
        # Lengths that the host knows are the worst case, so that launch shapes fit any replay.
        longest = batch.max_model_len
        inputs = batch.decode_inputs(
            buffers.slots, buffers.starts, [1] * size, [longest] * size, longest
        )
        logits = self._runner.model.logits(self._runner.forward(inputs))
        if stages is None:
            buffers.logits = logits
            return
        plan = SamplePlan(size, stages, from_table=True)
        dev = {"slot": buffers.slots, "position": buffers.starts}
        sampled = self._runner.sampler(logits, plan, dev)
        tokens = sampled.tokens.to(torch.int32)
        verified = Verified(tokens[:, None], buffers.ones, sampled.status)
        self._runner.commit(verified, buffers.slots, buffers.starts, penalties=False)
        buffers.emitted = torch.stack((tokens, sampled.status))

    def _record(self, buffers: Buffers, stages: Feature | None) -> None:
        """Warm up on the null slot, then capture."""
        backend = self._backend
        before = torch.accelerator.memory_reserved()
        # First calls compile kernels and create library handles, which capture forbids.
        side = torch.Stream(self._runner.batch.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            for _ in range(2):
                self._body(buffers, stages)
        torch.accelerator.current_stream().wait_stream(side)
        torch.accelerator.synchronize()
        graph_class = getattr(backend, "CUDAGraph", None) or backend.XPUGraph
        graph = graph_class()
        with backend.graph(graph, pool=self._pool):
            self._body(buffers, stages)
        buffers.replay = graph.replay
        self.stats.captured += 1
        self.stats.bytes += max(0, torch.accelerator.memory_reserved() - before)
