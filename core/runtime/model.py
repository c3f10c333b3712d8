"""The one interpreter: builds the blocks that a `ModelDesc` names and runs them in order.

A forward pass is: embed, then per layer its residual branches, then the final norm. No host
synchronisation and no shape that depends on data, so a step can be captured in a graph. The
model owns weights and attention seams; caches, plans and sampling belong to the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cardcage.core.contracts import DeviceFacts, KVPart, LinearKernel, LinearNeed, Quantizer
from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Branch, LayerSpec, ModelDesc
from cardcage.core.runtime.layers import (
    Attention,
    AttentionKey,
    Block,
    BuildContext,
    ModelInput,
    dtype_name,
)
from cardcage.core.runtime.weights import load_weights
from cardcage.core.types import KVGroupSpec

__all__ = ["AttentionKey", "Model", "build_model", "load_weights"]

_ALIGN = 64  # bytes; each cache part starts on such a boundary of its page


def _part_bytes(part: KVPart) -> int:
    dtype: torch.dtype = getattr(torch, part.dtype)
    count = 1
    for size in part.shape:
        count *= size
    return count * dtype.itemsize


_Branch = tuple[Block | None, Block, Block | None, float]  # norm, op, post norm, scale
_AddNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _add_norm(norm: Block | None) -> _AddNorm | None:
    """The norm's one-pass form of x += delta; norm(x), if it has one."""
    fused: _AddNorm | None = getattr(norm, "add_norm", None)
    return fused


class _Step:
    """The branches that read x together: one, or all of a parallel layer.

    A step returns what x has yet to gain, so that the next norm can add it in the same pass.
    """

    __slots__ = ("_add_norm", "_branches", "_dtype")

    def __init__(self, branches: list[_Branch], dtype: torch.dtype) -> None:
        self._branches = branches
        self._dtype = dtype
        self._add_norm = _add_norm(branches[0][0]) if len(branches) == 1 else None

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, inp: ModelInput
    ) -> torch.Tensor:
        """x gains `delta` in place; returns this step's own delta."""
        fused = self._add_norm
        if delta is not None and fused is not None:
            norm, op, post_norm, scale = self._branches[0]
            return self._finish(op(fused(x, delta), inp), post_norm, scale, inp)
        if delta is not None:
            x.add_(delta)
        total: torch.Tensor | None = None
        for norm, op, post_norm, scale in self._branches:
            y = op(x.to(self._dtype) if norm is None else norm(x, inp), inp)
            y = self._finish(y, post_norm, scale, inp)
            total = y if total is None else total.add_(y)
        assert total is not None
        return total

    @staticmethod
    def _finish(
        y: torch.Tensor, post_norm: Block | None, scale: float, inp: ModelInput
    ) -> torch.Tensor:
        if post_norm is not None:
            y = post_norm(y, inp)
        return y if scale == 1.0 else y.mul_(scale)


class Model:
    """A built model. Call `load_weights`, set each attention layer's cache, then `forward`.

    Attributes:
        attention_keys: the distinct attention needs, with backend and KV group.
        attention_layers: the attention seams in layer order; their `cache` is set by the runner.
        graph_safe: False if a step of this model must synchronise with the host.
    """

    def __init__(self, ctx: BuildContext, quantizer: Quantizer) -> None:
        self.desc = ctx.desc
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.facts = ctx.facts
        self.quantizer = quantizer
        self._resolve = ctx.resolve
        self._kernels: dict[LinearNeed, LinearKernel] = {}
        self._blocks: list[Block] = []

        self._embed = ctx.embedding()
        self._steps: list[_Step] = []
        for layer in ctx.desc.layers:
            self._steps.extend(self._layer(layer, ctx))
        final = ctx.desc.final_norm
        self._final = None if final is None else ctx.make(final)
        self._final_add_norm = _add_norm(self._final)
        self._head = ctx.head(self._embed)
        self._scale, self._softcap = ctx.desc.head.scale, ctx.desc.head.softcap

        self.weights = ctx.weights
        self.attention_layers: list[Attention] = ctx.attention_layers
        self.attention_keys: list[AttentionKey] = ctx.attention_keys
        self._ropes = ctx.ropes
        self._groups, self._offsets = self._plan_cache(ctx.block_size)

    def _layer(self, layer: LayerSpec, ctx: BuildContext) -> list[_Step]:
        def build(branch: Branch) -> _Branch:
            norm = None if branch.norm is None else ctx.make(branch.norm)
            op = ctx.make(branch.op)
            post = None if branch.post_norm is None else ctx.make(branch.post_norm)
            self._blocks.append(op)
            return norm, op, post, branch.scale

        if layer.parallel:
            return [_Step([build(branch) for branch in layer.branches], self.dtype)]
        return [_Step([build(branch)], self.dtype) for branch in layer.branches]

    # ---- the step --------------------------------------------------------------------------

    def forward(self, inp: ModelInput) -> torch.Tensor:
        """The hidden states after the final norm, [T, hidden] in the model's dtype."""
        positions = inp.positions
        inp.ropes = [rope.tables(positions) for rope in self._ropes]
        # The residual stream is float32 in every model: in bfloat16 each layer's sum would be
        # rounded to 8 bits. It moves few bytes beside the weights (docs/decisions/0006).
        x = self._embed(inp.input_ids).to(torch.float32)
        delta: torch.Tensor | None = None
        for step in self._steps:
            delta = step(x, delta, inp)
        if self._final_add_norm is not None and delta is not None:
            return self._final_add_norm(x, delta)
        if delta is not None:
            x.add_(delta)
        return x.to(self.dtype) if self._final is None else self._final(x, inp)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> logits float32 [n, V]: scale, then softcap.

        Never rounded to the model's dtype: near 16, bfloat16 steps by an eighth, which ties
        tokens that the model tells apart.
        """
        logits = self._head.wide(hidden)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    @property
    def graph_safe(self) -> bool:
        return all(getattr(block, "graph_safe", True) for block in self._blocks)

    # ---- the cache's layout ------------------------------------------------------------------

    def _plan_cache(
        self, block_size: int
    ) -> tuple[tuple[KVGroupSpec, ...], list[list[tuple[KVPart, int]]]]:
        """Layers of equal window and equal parts share a group: one block id for all of them."""
        signatures: dict[tuple[int, tuple[KVPart, ...]], int] = {}
        for key in self.attention_keys:
            signature = (key.need.window, tuple(key.backend.kv_parts()))
            key.group = signatures.setdefault(signature, len(signatures))
        used = [0] * len(signatures)
        offsets: list[list[tuple[KVPart, int]]] = []
        for layer in self.attention_layers:
            key = self.attention_keys[layer.key]
            places = []
            for part in key.backend.kv_parts():
                places.append((part, used[key.group]))
                used[key.group] += -(-_part_bytes(part) // _ALIGN) * _ALIGN
            offsets.append(places)
        groups = []
        for (window, _), index in signatures.items():
            kind = "window" if window else "full"
            options = {"window": window} if window else {}
            name = f"{kind}{index}"
            groups.append(KVGroupSpec(name, kind, block_size, used[index], options))
        return tuple(groups), offsets

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """One spec per group; `page_bytes` covers all layers of the group, layer by layer."""
        return self._groups

    def kv_offsets(self) -> list[list[tuple[KVPart, int]]]:
        """Per attention layer its cache parts and their byte offsets within a page."""
        return self._offsets

    # ---- loading and reporting ----------------------------------------------------------------

    def linear_kernel(self, need: LinearNeed) -> LinearKernel:
        """The linear plugin for a need, resolved once."""
        kernel = self._kernels.get(need)
        if kernel is None:
            kernel = self._kernels[need] = self._resolve("linear", need)
        return kernel

    def finish_loading(self) -> None:
        """Called after the last weight: blocks may derive tables from what they loaded."""
        for block in self._blocks:
            finish: Callable[[], None] | None = getattr(block, "finish_loading", None)
            if finish is not None:
                finish()

    def explain(self) -> dict[str, Any]:
        """What was chosen inside, JSON-able."""
        layouts: dict[str, int] = {}
        for need, kernel in self._kernels.items():
            what = f"{need.encoding} -> {kernel.layout_id}"
            layouts[what] = layouts.get(what, 0) + 1
        return {
            "architecture": self.desc.architecture,
            "layers": len(self.desc.layers),
            "dtype": dtype_name(self.dtype),
            "linear": layouts,
            "attention": [
                {
                    "window": key.need.window,
                    "head_size": key.need.head_size,
                    "num_kv_heads": key.need.num_kv_heads,
                    "group": self._groups[key.group].name,
                    "layers": sum(a.key == i for a in self.attention_layers),
                }
                for i, key in enumerate(self.attention_keys)
            ],
            "kv_page_bytes": {g.name: g.page_bytes for g in self._groups},
            "graph_safe": self.graph_safe,
        }


def build_model(
    desc: ModelDesc,
    *,
    device: torch.device,
    dtype: torch.dtype,
    resolve: Callable[..., Any],
    quantizer: Quantizer,
    block_size: int,
    kv_format: str = "auto",
    device_facts: DeviceFacts,
    max_model_len: int | None = None,
) -> Model:
    """Build the blocks of a description. No weight is read and almost no memory is taken.

    Args:
        desc: what a models plugin described.
        device: where parameters will live.
        dtype: compute dtype: float32, bfloat16 or float16.
        resolve: `resolve(kind, need, use="auto")` builds another plugin.
        quantizer: turns checkpoint tensors into records.
        block_size: tokens per KV block.
        kv_format: how K and V are stored; "auto" is the compute dtype.
        device_facts: what attention and linear plugins may ask of the device.
        max_model_len: longest sequence to serve; it selects LongRoPE's factors. None means the
            model's own context.

    Raises:
        UnsupportedModel: the description asks for something that no block does.
        SelectionError: no plugin fits a need.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise UnsupportedModel(f"models compute in float32, bfloat16 or float16, not {dtype}")
    ctx = BuildContext(
        desc,
        dtype=dtype,
        device=device,
        facts=device_facts,
        resolve=resolve,
        block_size=block_size,
        kv_format=kv_format,
        max_model_len=desc.max_position if max_model_len is None else max_model_len,
    )
    return Model(ctx, quantizer)
