"""Mixture of experts: routing, the ways to run the experts, packed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cardcage.core.contracts import LinearDesc, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.plugins.blocks import _moe
from tests.support.building import RandomSource, context, desc, load, make, shapes_of, step
from tests.support.paged import DictSource, PlainQuantizer, facts, resolver

HIDDEN, SIZE = 16, 24


def args(experts: int = 6, top_k: int = 2, renorm: bool = True) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "top_k": top_k,
        "intermediate_size": SIZE,
        "renorm": renorm,
    }


def formula(t: Mapping[str, torch.Tensor], x: torch.Tensor, a: Mapping[str, Any]) -> torch.Tensor:
    """One token at a time, in float64."""
    out = []
    for row in x.double():
        probs = (t["m.gate.weight"].double() @ row).softmax(0)
        weights, ids = probs.topk(a["top_k"])
        if a["renorm"]:
            weights = weights / weights.sum()
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for w, e in zip(weights, ids.tolist(), strict=True):
            gate, up, down = (
                t[f"m.experts.{e}.{n}_proj.weight"].double() for n in ("gate", "up", "down")
            )
            y += w * (down @ (F.silu(gate @ row) * (up @ row)))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("renorm", [True, False])
def test_equals_the_formula(tokens: int, experts: int, top_k: int, renorm: bool) -> None:
    a = args(experts, top_k, renorm)
    ctx = context(desc(HIDDEN))
    block, source = make(Node("moe", "m", a), ctx, std=0.5)
    x = torch.randn(tokens, HIDDEN)
    before = x.clone()
    got = block(x, step(ctx, tokens))
    assert torch.equal(x, before)
    torch.testing.assert_close(got.double(), formula(source.tensors, x, a), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_ways_to_run_agree(dtype: torch.dtype, tokens: int) -> None:
    ctx = context(desc(HIDDEN), dtype)
    block, _ = make(Node("moe", "m", args()), ctx, std=0.5)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    ids, weights = _moe.route(block._router(x), 2, True)
    runs = [_moe.by_expert, _moe.dense]
    if not torch.cuda.is_available():  # then the interpreter runs kernels on host tensors
        runs.append(_moe.kernels("swiglu"))
    results = [run(x, ids, weights, block._bank, block._act) for run in runs]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for other in results[1:]:
        assert other.dtype == dtype
        torch.testing.assert_close(other, results[0], atol=tolerance, rtol=tolerance)


def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    ids, weights = _moe.route(logits, 2, True)
    assert ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


def test_which_way_is_taken_depends_on_the_platform() -> None:
    def built(device_type: str, *features: str) -> Any:
        ctx = context(desc(HIDDEN), facts=facts(device_type, frozenset(features)))
        return make(Node("moe", "m", args()), ctx)[0]

    assert built("cpu", "triton")._run is _moe.by_expert
    assert built("cuda")._run is _moe.dense
    assert built("cuda")._run is _moe.dense
    with_kernels = built("cuda", "triton")
    assert with_kernels._run not in (_moe.dense, _moe.by_expert)
    assert with_kernels.graph_safe
    assert not built("cpu").graph_safe


class PackedExperts(PlainQuantizer):
    """Expert weights whose records claim to be packed (`which` of gate, up, down)."""

    def __init__(self, which: tuple[str, ...]) -> None:
        self.which = which

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, torch.Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        record = super().record(desc, tensors, index, dtype)
        if any(f".{name}" in desc.name for name in self.which):
            record.encoding = "packed"
        return record


@pytest.mark.parametrize("which", [("gate", "up", "down"), ("down",), ("gate", "up"), ("up",)])
def test_packed_experts_keep_their_kernels(which: tuple[str, ...]) -> None:
    ctx = context(desc(HIDDEN))
    block = ctx.make(Node("moe", "m", args()))
    source = RandomSource({**shapes_of(ctx), "embed.weight": (11, HIDDEN)}, std=0.5)
    load(ctx, source, PackedExperts(tuple(f"{name}_proj" for name in which)))
    block.finish_loading()
    assert block._bank.w13 is None
    assert "packed" in block._bank.encodings
    assert not block.graph_safe
    x = torch.randn(9, HIDDEN)
    want = formula(source.tensors, x, args())
    torch.testing.assert_close(block(x, step(ctx, 9)).double(), want, atol=1e-5, rtol=1e-5)


def test_experts_half_packed_are_refused() -> None:
    ctx = context(desc(HIDDEN))
    ctx.make(Node("moe", "m", args()))
    source = RandomSource({**shapes_of(ctx), "embed.weight": (11, HIDDEN)})
    with pytest.raises(CheckpointError, match="partly"):
        load(ctx, source, PackedExperts(("experts.3.",)))


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_spellings_and_stacks_give_the_same_bank(names: tuple[str, str, str]) -> None:
    t = {
        f"m.experts.{e}.{name}.weight": torch.randn(shape)
        for e in range(6)
        for name, shape in zip(names, [(SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE)], strict=True)
    }
    rest = {"m.gate.weight": torch.randn(6, HIDDEN), "embed.weight": torch.randn(11, HIDDEN)}
    gate, up, down = (
        torch.stack([t[f"m.experts.{e}.{name}.weight"] for e in range(6)]) for name in names
    )
    stacked = {"m.experts.gate_up_proj": torch.cat([gate, up], 1), "m.experts.down_proj": down}
    banks = []
    for weights in (t, stacked):
        ctx = context(desc(HIDDEN), resolve=resolver())
        block = ctx.make(Node("moe", "m", args()))
        load(ctx, DictSource({**weights, **rest}))
        banks.append(block._bank)
    assert torch.equal(banks[0].w13, banks[1].w13)
    assert torch.equal(banks[0].w2, banks[1].w2)


@pytest.mark.parametrize("changes", [{"top_k": 9}, {"top_k": 0}, {"shared": 1}])
def test_mistakes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"top_k|shared"):
        context().make(Node("moe", "m", {**args(), **changes}))
