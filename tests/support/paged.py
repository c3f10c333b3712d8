"""A small host for models in tests: resolver, weight source, paged cache, greedy decoding.

It stands in for the runner with none of its cleverness: every group gets a pool of its own,
block ids are handed out in a shuffled order, freed window blocks are poisoned with NaN, and the
attention backend is a few lines of float64 torch.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cardcage.core.contracts import (
    AttentionNeed,
    DeviceFacts,
    KVPart,
    LinearDesc,
    PluginContext,
    QuantTensor,
    StepMeta,
    TensorMeta,
)
from cardcage.core.model_desc import ModelDesc
from cardcage.core.runtime.layers import ModelInput
from cardcage.core.runtime.model import Model, build_model, load_weights

BLOCK_SIZE = 4
BLOCKS = ("gqa", "layernorm", "mlp", "moe", "rms")


class PlainQuantizer:
    """Unquantized weights, as the `none` quantizer defines them."""

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        return (f"{desc.name}.weight",)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, torch.Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        weight = tensors[f"{desc.name}.weight"].to(dtype)
        return QuantTensor(
            "none",
            (desc.out_features, desc.in_features),
            {"weight": weight},
            lambda r: r.parts["weight"].float(),
            lambda r, ids: r.parts["weight"][ids].float(),
        )


class DictSource:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.reads: list[str] = []

    @classmethod
    def of_folder(cls, folder: Path) -> DictSource:
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(path))
        return cls(tensors)

    def index(self) -> dict[str, TensorMeta]:
        return {
            name: TensorMeta(
                tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.itemsize
            )
            for name, t in self.tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name]

    def close(self) -> None: ...


class PlainAttention:
    """AttentionBackend in float64 torch, one request at a time. Clear, slow, exact."""

    def __init__(self, need: AttentionNeed) -> None:
        self.need = need

    def kv_parts(self) -> tuple[KVPart, ...]:
        n = self.need
        return (
            KVPart("k", (n.num_kv_heads, n.block_size, n.head_size), n.dtype),
            KVPart("v", (n.num_kv_heads, n.block_size, n.value_size), n.dtype),
        )

    def plan(self, meta: StepMeta) -> StepMeta:
        return meta

    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: StepMeta
    ) -> None:
        size = self.need.block_size
        slots = plan.slot_mapping
        for store, new in zip(cache, (k, v), strict=True):
            store[slots // size, :, slots % size] = new

    def forward(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: StepMeta,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n = self.need
        rows = []
        start = 0
        for r, (query_len, seq_len) in enumerate(
            zip(plan.query_lens_host, plan.seq_lens_host, strict=True)
        ):
            first = 0
            if n.window:
                first = max(0, seq_len - query_len - n.window + 1)
            keys = torch.arange(first, seq_len, device=q.device)
            blocks = plan.block_table[r][keys // n.block_size].long()
            k, v = (c[blocks, :, keys % n.block_size].double() for c in cache)
            queries = torch.arange(seq_len - query_len, seq_len, device=q.device)
            visible = keys[None, :] <= queries[:, None]
            if n.window:
                visible &= keys[None, :] > queries[:, None] - n.window
            qr = q[start : start + query_len].double()
            k = k.repeat_interleave(n.group_size, 1)
            v = v.repeat_interleave(n.group_size, 1)
            scores = torch.einsum("qhd,khd->hqk", qr, k) * n.scale
            if n.softcap:
                scores = n.softcap * torch.tanh(scores / n.softcap)
            scores = scores.masked_fill(~visible, -math.inf)
            if sinks is not None:
                extra = sinks.double().view(-1, 1, 1).expand(-1, query_len, 1)
                probs = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
            else:
                probs = scores.softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype))
            start += query_len
        return torch.cat(rows)


def facts(device_type: str = "cpu", features: frozenset[str] = frozenset()) -> DeviceFacts:
    """Device facts for tests. A device type other than the host's with the feature "triton" on
    host tensors makes blocks use their kernels, which the interpreter then runs."""
    return DeviceFacts("test", device_type, (), 1 << 30, 1 << 30, 1, features)


def resolver(
    attention: Callable[[AttentionNeed], Any] = PlainAttention,
) -> Callable[..., Any]:
    """`resolve(kind, need, use)` over declarations taken directly, with no registry."""
    ctx = PluginContext(logging.getLogger("test"), {}, lambda: 0.0, Path("."))

    def resolve(kind: str, need: Any, use: str = "auto", **extras: Any) -> Any:
        if kind == "attention":
            return attention(need)
        if kind == "linear":
            use = "torch_matmul"
        module = import_module(f"cardcage.plugins.{kind}.{use}")
        found = [
            c
            for c in vars(module).values()
            if isinstance(c, type) and getattr(c, "name", "") == use
        ]
        (declaration,) = found
        return declaration().build(need, ctx, None)

    return resolve


class Host:
    """A loaded model with a paged cache per group, for any number of requests."""

    def __init__(
        self,
        desc: ModelDesc,
        source: Any,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        max_tokens: int = 256,
        max_requests: int = 3,
        attention: Callable[[AttentionNeed], Any] = PlainAttention,
        quantizer: Any = None,
        max_model_len: int | None = None,
        device: str = "cpu",
        device_facts: DeviceFacts | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.model: Model = build_model(
            desc,
            device=self.device,
            dtype=dtype,
            resolve=resolver(attention),
            quantizer=quantizer or PlainQuantizer(),
            block_size=block_size,
            device_facts=device_facts or facts(),
            max_model_len=max_model_len,
        )
        load_weights(self.model, source)
        self.block_size = block_size
        self.max_blocks = -(-max_tokens // block_size)
        count = 1 + self.max_blocks * max_requests
        self.pools = []
        self.free: list[list[int]] = []
        for group in self.model.kv_groups():
            self.pools.append(
                torch.full((count * group.page_bytes,), 0xFF, dtype=torch.uint8, device=device)
            )
            ids = list(range(1, count))
            random.Random(7).shuffle(ids)
            self.free.append(ids)
        for layer, places in zip(self.model.attention_layers, self.model.kv_offsets(), strict=True):
            g = self.model.attention_keys[layer.key].group
            page = self.model.kv_groups()[g].page_bytes
            layer.cache = tuple(self._view(g, part, at, page, count) for part, at in places)
        self.tables: dict[str, list[list[int]]] = {}
        self.lengths: dict[str, int] = {}

    def _view(self, group: int, part: KVPart, offset: int, page: int, count: int) -> torch.Tensor:
        dtype = getattr(torch, part.dtype)
        size = dtype.itemsize
        strides = [1]
        for n in reversed(part.shape[1:]):
            strides.insert(0, strides[0] * n)
        return torch.as_strided(
            self.pools[group].view(dtype),
            (count, *part.shape),
            (page // size, *strides),
            offset // size,
        )

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> torch.Tensor:
        """Run tokens of several requests; returns float32 logits of all rows [T, V]."""
        ids, positions = [], []
        for name, tokens in work:
            start = self.lengths.setdefault(name, 0)
            self.lengths[name] = start + len(tokens)
            ids += list(tokens)
            positions += range(start, start + len(tokens))
            tables = self.tables.setdefault(name, [[] for _ in self.pools])
            for g, table in enumerate(tables):
                while len(table) * self.block_size < self.lengths[name]:
                    table.append(self.free[g].pop())
        metas = [self._meta(g, work) for g in range(len(self.pools))]
        plans = [key.backend.plan(metas[key.group]) for key in self.model.attention_keys]
        inp = ModelInput(self._put(ids), self._put(positions), plans)
        logits = self.model.logits(self.model.forward(inp)).float().cpu()
        for name, _ in work:
            self._poison(name)
        return logits

    def _put(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _meta(self, group: int, work: Sequence[tuple[str, Sequence[int]]]) -> StepMeta:
        query = [len(tokens) for _, tokens in work]
        lengths = [self.lengths[name] for name, _ in work]
        starts = [0]
        for n in query:
            starts.append(starts[-1] + n)
        table = torch.zeros(len(work), self.max_blocks, dtype=torch.int32)
        slots = []
        for r, (name, _) in enumerate(work):
            blocks = self.tables[name][group]
            table[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            for p in range(lengths[r] - query[r], lengths[r]):
                slots.append(blocks[p // self.block_size] * self.block_size + p % self.block_size)
        return StepMeta(
            num_reqs=len(work),
            num_tokens=starts[-1],
            num_decodes=0,
            max_query_len=max(query),
            max_seq_len=max(lengths),
            query_start_loc=self._put(starts, torch.int32),
            seq_lens=self._put(lengths, torch.int32),
            block_table=table.to(self.device),
            slot_mapping=self._put(slots),
            query_lens_host=query,
            seq_lens_host=lengths,
        )

    def _poison(self, name: str) -> None:
        """Fill blocks that a window has left behind with NaN: nobody may read them again."""
        for g, group in enumerate(self.model.kv_groups()):
            if group.kind != "window":
                continue
            dead = (self.lengths[name] - group.options["window"] + 1) // self.block_size
            for block in self.tables[name][g][: max(dead, 0)]:
                page = group.page_bytes
                self.pools[g][block * page : (block + 1) * page] = 0xFF

    def drop(self, name: str) -> None:
        """Forget a request and free its blocks."""
        for g, table in enumerate(self.tables.pop(name)):
            self.free[g] += table
        del self.lengths[name]

    def prefill(self, tokens: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
        """Logits [len(tokens), V] of one fresh request, cut at the given chunk lengths."""
        rows, start = [], 0
        for n in (*chunks, len(tokens)):
            part = tokens[start : start + n]
            if part:
                rows.append(self.step([("prefill", part)]))
            start += len(part)
        self.drop("prefill")
        return torch.cat(rows)

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` greedy ids after a prompt."""
        logits = self.step([("greedy", tokens)])
        out = [int(logits[-1].argmax())]
        while len(out) < count:
            out.append(int(self.step([("greedy", out[-1:])])[-1].argmax()))
        self.drop("greedy")
        return out
