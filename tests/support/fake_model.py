"""A two-layer causal model in plain torch behind the runner's model interface.

Each token really depends on its history through the paged cache, so a wrong block, position or
mask changes the output. `reference` computes the same without any cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cardcage.core.contracts import KVPart, StepMeta
from cardcage.core.types import KVGroupSpec, SamplingParams, SlotAdmit, StepPlan


class LoopAttention:
    """One head, one loop over requests; window 0 sees everything."""

    def __init__(self, size: int, block_size: int, window: int) -> None:
        self.size, self.block_size, self.window = size, block_size, window

    def kv_parts(self) -> tuple[KVPart, ...]:
        shape = (self.block_size, self.size)
        return KVPart("k", shape, "float32"), KVPart("v", shape, "float32")

    def plan(self, meta: StepMeta) -> StepMeta:
        return meta

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: Any, plan: StepMeta) -> None:
        kept = plan.slot_mapping >= 0
        slot = plan.slot_mapping[kept]
        for part, new in zip(cache, (k, v)):
            part[slot // self.block_size, slot % self.block_size] = new[kept]

    def forward(self, q: torch.Tensor, cache: Any, plan: StepMeta) -> torch.Tensor:
        out = torch.zeros_like(q)
        start = plan.query_start_loc.tolist()
        for r in range(plan.num_reqs):
            length = int(plan.seq_lens[r])
            blocks = plan.block_table[r, : -(-length // self.block_size)].long()
            k, v = (part[blocks].flatten(0, 1)[:length] for part in cache)
            rows = q[start[r] : start[r + 1]]
            positions = torch.arange(length - len(rows), length)[:, None]
            out[start[r] : start[r + 1]] = attend(rows, k, v, positions, self.window)
        return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, window: int
) -> torch.Tensor:
    """Row by row, so that no result depends on the shape of a batch."""
    keys = torch.arange(len(k))
    out = []
    for row, position in zip(q, positions[:, 0].tolist()):
        seen = keys <= position
        if window:
            seen &= keys > position - window
        weight = torch.softmax((k[seen] * row).sum(-1), 0)
        out.append((weight[:, None] * v[seen]).sum(0))
    return torch.stack(out)


@dataclass
class Key:
    backend: LoopAttention
    group: int


class FakeModel:
    """Layer 0 sees everything (group 0), layer 1 a window (group 1), unless windows says other."""

    def __init__(
        self,
        vocab: int = 48,
        size: int = 8,
        block_size: int = 4,
        windows: tuple[int, ...] = (0, 7),
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.size, self.windows = vocab, size, windows
        self.embedding = torch.randn(vocab, size, generator=g)
        self.mix = torch.randn(len(windows), 4, size, size, generator=g) * 0.6
        self.attention_keys = [
            Key(LoopAttention(size, block_size, w), i) for i, w in enumerate(windows)
        ]
        self.attention_layers = [SimpleNamespace(key=i, cache=()) for i in range(len(windows))]
        page = 2 * -(-block_size * size * 4 // 64) * 64
        self._groups = tuple(
            KVGroupSpec(
                f"g{i}", "window" if w else "full", block_size, page, {"window": w} if w else {}
            )
            for i, w in enumerate(windows)
        )
        self._offsets = [
            [(part, i * page // 2) for i, part in enumerate(key.backend.kv_parts())]
            for key in self.attention_keys
        ]
        self.graph_safe = True
        self.desc = SimpleNamespace(max_position=64, vocab_size=vocab)
        self.forwards = 0

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self._groups

    def kv_offsets(self) -> list[list[tuple[KVPart, int]]]:
        return self._offsets

    def explain(self) -> dict[str, Any]:
        return {"fake": True}

    def forward(self, inp: Any) -> torch.Tensor:
        self.forwards += 1
        assert int(inp.input_ids.min()) >= 0
        assert int(inp.input_ids.max()) < self.vocab
        x = self._embed(inp.input_ids, inp.positions)
        for i, layer in enumerate(self.attention_layers):
            q, k, v = (self._mul(x, self.mix[i, j]) for j in range(3))
            backend, plan = self.attention_keys[layer.key].backend, inp.plans[layer.key]
            backend.write(k, v, layer.cache, plan)
            x = torch.tanh(x + self._mul(backend.forward(q, layer.cache, plan), self.mix[i, 3]))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 4.0 * self._mul(hidden, self.embedding.T)

    def reference(self, ids: list[int]) -> torch.Tensor:
        """Logits [T, V] of a whole sequence, without a cache."""
        positions = torch.arange(len(ids))
        x = self._embed(torch.tensor(ids), positions)
        for i, window in enumerate(self.windows):
            q, k, v = (self._mul(x, self.mix[i, j]) for j in range(3))
            seen = attend(q, k, v, positions[:, None], window)
            x = torch.tanh(x + self._mul(seen, self.mix[i, 3]))
        return self.logits(x)

    def greedy(self, prompt: list[int], num: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num):
            ids.append(int(self.reference(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wave = torch.sin(positions[:, None] * torch.arange(1, self.size + 1) * 0.7)
        return self.embedding[ids] + wave

    @staticmethod
    def _mul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # Elementwise product and sum: the same bits whatever the number of rows.
        return (x[:, :, None] * w[None]).sum(1)


class Blocks:
    """Hands out block ids for tests: odd ids to odd groups, so that no two groups share bytes."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._next = 1
        self._free: list[list[int]] = [[] for _ in range(num_groups)]

    def take(self, group: int, num: int) -> list[int]:
        out = []
        for _ in range(num):
            if self._free[group]:
                out.append(self._free[group].pop())
            else:
                out.append(self._next)
                self._next += 1
        return out

    def give(self, group: int, ids: list[int]) -> None:
        self._free[group].extend(ids)


@dataclass
class Live:
    """A request that a hand-made plan drives."""

    slot: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    blocks: tuple[list[int], ...]
    computed: int = 0


class Driver:
    """Makes plans by hand, the way a scheduler would, over a `ModelRunner`."""

    def __init__(self, num_groups: int, block_size: int = 4) -> None:
        self.blocks = Blocks(num_groups)
        self.num_groups, self.block_size = num_groups, block_size
        self.steps = 0

    def admit(
        self,
        slot: int,
        tokens: list[int],
        prompt_len: int | None = None,
        params: SamplingParams | None = None,
        seed: int = 0,
        computed: int = 0,
        eos: tuple[int, ...] = (),
    ) -> tuple[Live, SlotAdmit]:
        need = -(-len(tokens) // self.block_size)
        blocks = tuple(self.blocks.take(g, need) for g in range(self.num_groups))
        params = params or SamplingParams(temperature=0.0)
        live = Live(slot, list(tokens), prompt_len or len(tokens), params, seed, blocks, computed)
        admit = SlotAdmit(
            slot,
            f"r{slot}",
            list(tokens),
            live.prompt_len,
            computed,
            params,
            seed,
            eos,
            tuple(list(b) for b in blocks),
        )
        return live, admit

    def plan(
        self,
        rows: list[tuple[Live, int, bool]],
        admits: list[SlotAdmit] | None = None,
        releases: list[int] | None = None,
        drafts: list[int] | None = None,
    ) -> StepPlan:
        """rows: (request, number of tokens, sampled?). Grows blocks and moves `computed`."""
        appends = []
        for live, num, _ in rows:
            need = -(-(live.computed + num) // self.block_size)
            for g in range(self.num_groups):
                have = len(live.blocks[g])
                if need > have:
                    new = self.blocks.take(g, need - have)
                    live.blocks[g].extend(new)
                    appends.append((g, live.slot, have, new))
        self.steps += 1
        plan = StepPlan(
            step=self.steps,
            slots=np.array([live.slot for live, _, _ in rows], np.int32),
            starts=np.array([live.computed for live, _, _ in rows], np.int32),
            num_tokens=np.array([num for _, num, _ in rows], np.int32),
            num_drafts=np.array(drafts or [0] * len(rows), np.int32),
            samples=np.array([s for _, _, s in rows], np.bool_),
            admits=admits or [],
            releases=releases or [],
            block_appends=appends,
        )
        for live, num, _ in rows:
            live.computed += num
        return plan

    def free(self, live: Live) -> int:
        for g in range(self.num_groups):
            self.blocks.give(g, live.blocks[g])
        return live.slot
