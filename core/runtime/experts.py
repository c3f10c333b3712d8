"""A bank of expert MLPs: its weights, from any of the layouts that checkpoints use.

Unquantized experts become two stacked tensors, `w13` [E, 2 I, H] (gate rows, then up rows) and
`w2` [E, H, I], so that grouped kernels can run them. Quantized experts keep one kernel handle
each. How tokens reach experts is the moe block's business.

Source: quant.md 1.9 of this project's specification; tensor names of Mixtral, Qwen3-MoE and
transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cardcage.core.contracts import LinearDesc, Quantizer, TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.core.runtime.weights import PlanItem, WeightReader, join_rows, shape_of

# (gate, up, down) as checkpoints spell them
_SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_Runner = tuple[Callable[..., torch.Tensor], Any]


class Experts:
    """`w13` and `w2` are set when the experts are dense, None when they are packed."""

    def __init__(
        self, prefix: str, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        self.name = prefix
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.w13: torch.Tensor | None = None
        self.w2: torch.Tensor | None = None
        self.encodings: tuple[str, ...] = ()
        self._spelling: tuple[str, str, str] | None = None
        self._packed: list[tuple[list[_Runner], _Runner]] = []

    def _stacked(self, index: Mapping[str, TensorMeta]) -> bool:
        return f"{self.name}.gate_up_proj" in index or f"{self.name}.down_proj" in index

    def _descs(self, index: Mapping[str, TensorMeta], expert: int) -> list[LinearDesc]:
        """Gate, up and down of one expert, in the spelling that the checkpoint uses."""
        if self._spelling is None:
            starts = {spelling: f"{self.name}.0.{spelling[0]}." for spelling in _SPELLINGS}
            found = (s for s, start in starts.items() if any(k.startswith(start) for k in index))
            self._spelling = next(found, _SPELLINGS[0])
        i, h = self.intermediate_size, self.hidden_size
        gate, up, down = (f"{self.name}.{expert}.{name}" for name in self._spelling)
        return [
            LinearDesc(gate, "moe", i, h),
            LinearDesc(up, "moe", i, h),
            LinearDesc(down, "moe", h, i),
        ]

    def plan(self, index: Mapping[str, TensorMeta], quantizer: Quantizer) -> list[PlanItem]:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        if self._stacked(index):
            up, down = f"{self.name}.gate_up_proj", f"{self.name}.down_proj"
            return [
                PlanItem(self.name, (up,), "w13", {up: (e, 2 * i, h)}),
                PlanItem(self.name, (down,), "w2", {down: (e, h, i)}),
            ]
        items = []
        for expert in range(e):
            for desc in self._descs(index, expert):
                names = tuple(quantizer.slots(desc, index))
                shape = (desc.out_features, desc.in_features)
                shapes = shape_of(names, f"{desc.name}.weight", shape, index)
                items.append(PlanItem(self.name, names, desc.name, shapes))
        return items

    def load(self, reader: WeightReader) -> None:
        if self._stacked(reader.index):
            self.w13 = reader.plain(f"{self.name}.gate_up_proj", reader.dtype).to(reader.device)
            self.w2 = reader.plain(f"{self.name}.down_proj", reader.dtype).to(reader.device)
            self.encodings = ("none",)
            return
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        seen: set[str] = set()
        for expert in range(e):
            gate, up, down = (reader.record(d) for d in self._descs(reader.index, expert))
            kinds = {gate.encoding, up.encoding, down.encoding}
            seen |= kinds
            if kinds == {"none"}:
                if self._packed:
                    raise self._mixed(seen)
                if self.w13 is None or self.w2 is None:
                    self.w13 = torch.empty(e, 2 * i, h, dtype=reader.dtype, device=reader.device)
                    self.w2 = torch.empty(e, h, i, dtype=reader.dtype, device=reader.device)
                self.w13[expert, :i] = gate.parts["weight"]
                self.w13[expert, i:] = up.parts["weight"]
                self.w2[expert] = down.parts["weight"]
                continue
            if self.w13 is not None:
                raise self._mixed(seen)
            first = [self._bind(reader, r) for r in join_rows([gate, up])]
            self._packed.append((first, self._bind(reader, down)))
        self.encodings = tuple(sorted(seen))

    def _mixed(self, encodings: set[str]) -> CheckpointError:
        names = ", ".join(sorted(encodings))
        return CheckpointError(
            f"experts at {self.name!r} are stored partly dense, partly packed ({names}); "
            "convert the checkpoint so that all experts of a layer use one encoding"
        )

    @staticmethod
    def _bind(reader: WeightReader, record: Any) -> _Runner:
        n, k = record.shape
        kernel = reader.kernel(record.encoding, k, n)
        return kernel.run, kernel.prepare(record, reader.device)

    def gate_up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [n, H] -> [n, 2 I] of one expert: gate, then up."""
        if self.w13 is not None:
            return F.linear(x, self.w13[expert])
        parts = [run(handle, x) for run, handle in self._packed[expert][0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def down(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [n, I] -> [n, H] of one expert."""
        if self.w2 is not None:
            return F.linear(x, self.w2[expert])
        run, handle = self._packed[expert][1]
        out: torch.Tensor = run(handle, x)
        return out
