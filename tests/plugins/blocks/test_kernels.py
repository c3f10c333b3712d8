"""The Triton kernels of the blocks against their torch forms: on a GPU for real, on a host in
the interpreter (without bfloat16, to which it truncates where a device rounds)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from cardcage.core.model_desc import Branch, LayerSpec, Node, RopeSpec
from cardcage.core.runtime.rope import Rope
from cardcage.plugins.blocks import _kernels, _moe_kernels
from cardcage.plugins.blocks._mlp import ACTIVATIONS
from cardcage.plugins.blocks._norms import RMS_VARIANTS, rms_reference
from tests.support.building import RandomSource, context, desc, shapes_of
from tests.support.paged import Host, facts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
KERNELS = facts("cuda", frozenset({"triton"}))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of sums: in narrow dtypes at most a few values, by one place."""
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
        return
    torch.testing.assert_close(got, want)
    assert (got != want).float().mean() < 0.02


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("variant", RMS_VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (3, 17), (5, 576), (2, 1025)])
def test_rms(variant: str, dtype: torch.dtype, tokens: int, n: int) -> None:
    wide = randn(tokens, n + 7).to(dtype)
    x, delta, w = wide[:, 3 : n + 3], randn(tokens, n).to(dtype), randn(n)
    weight = w.to(dtype) if variant == "llama" else w + 1 if variant == "1p" else w
    run = functools.partial(
        _kernels.rms,
        weight=weight,
        eps=1e-5,
        round_first=variant == "llama",
        dtype=dtype,
    )
    before = wide.clone()
    near(run(x), rms_reference(x, w, 1e-5, variant))
    assert torch.equal(wide, before)
    total = x + delta
    near(run(x, delta=delta), rms_reference(total, w, 1e-5, variant))
    assert torch.equal(x, total)  # the sum is stored, and nothing beside it
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, n + 3 :], before[:, n + 3 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "size"), [(8, 8), (64, 64), (12, 20), (0, 16)])
@pytest.mark.parametrize("variant", [None, *RMS_VARIANTS])
def test_norm_rope(
    dtype: torch.dtype, pairing: str, dim: int, size: int, variant: str | None
) -> None:
    heads, kv_heads, tokens = 3, 2, 4
    qkv = randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    x = qkv[:, : heads + kv_heads]
    q_w, k_w = randn(size), randn(size)
    want_q, want_k = x[:, :heads], x[:, heads:]
    weights: list[torch.Tensor | None] = [None, None]
    if variant is not None:
        want_q = rms_reference(want_q, q_w, 1e-4, variant)
        want_k = rms_reference(want_k, k_w, 1e-4, variant)
        add = 1.0 if variant == "1p" else 0.0
        kept = dtype if variant == "llama" else torch.float32
        weights = [(w + add).to(kept) for w in (q_w, k_w)]
    tables = None
    if dim:
        rope = Rope(RopeSpec(dim, 1e4, pairing), 0, torch.device(DEVICE), 64)
        tables = rope.tables(torch.tensor([0, 3, 9, 63], device=DEVICE))
        want_q, want_k = rope.rotate(want_q, tables), rope.rotate(want_k, tables)
    got = _kernels.norm_rope(
        x, heads, tables, pairing == "interleaved", *weights, 1e-4, variant == "llama"
    )
    want = torch.cat([want_q, want_k], 1)
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        assert (got != want).float().mean() < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 72), (2, 1030)])
def test_gated(dtype: torch.dtype, activation: str, tokens: int, size: int) -> None:
    both = (randn(tokens, 2 * size) * 3).to(dtype)
    gate, up = both.chunk(2, -1)
    got, want = _kernels.gated(both, activation), ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3)
    if dtype != torch.float32 and got.numel() > 100:
        assert (got != want).float().mean() < 0.15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "size", "activation"),
    [
        (1, 4, 1, 16, 16, "swiglu"),
        (7, 5, 3, 20, 40, "geglu_tanh"),
        (50, 3, 2, 33, 17, "swiglu"),  # more rows than a tile of 16
        (9, 16, 2, 16, 72, "geglu"),  # most experts get nothing
    ],
)
def test_experts(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, size: int,
    activation: str,
) -> None:  # fmt: skip
    x = randn(tokens, hidden + 3).to(dtype)[:, 3:]
    w13, w2 = (randn(experts, *s).mul_(0.3).to(dtype) for s in ((2 * size, hidden), (hidden, size)))
    scores, ids = randn(tokens, experts).softmax(-1).topk(top_k)
    ids[0] = torch.arange(top_k, device=DEVICE)  # the first expert and, below, the last are used
    ids[-1] = experts - 1 - torch.arange(top_k, device=DEVICE)
    got = _moe_kernels.experts(x, ids, scores, w13, w2, activation)
    want = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
    for t in range(tokens):
        for e, w in zip(ids[t].tolist(), scores[t].tolist(), strict=True):
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            want[t] += w * (w2[e].double() @ (ACTIVATIONS[activation](gate) * up))
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_expert_tiles_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that only many tokens would get."""
    x, w13, w2 = randn(70, 24), randn(2, 80, 24), randn(2, 24, 40)
    scores, ids = randn(70, 2).softmax(-1).topk(1)
    want = _moe_kernels.experts(x, ids, scores, w13, w2, "swiglu")
    for cut in (_moe_kernels.Shape(64, 32, 16, 4), _moe_kernels.Shape(128, 16, 32, 8)):
        monkeypatch.setattr(_moe_kernels, "shape", lambda *_, cut=cut: cut)
        got = _moe_kernels.experts(x, ids, scores, w13, w2, "swiglu")
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_expert_tiles_grow_with_the_tokens() -> None:
    rows = [_moe_kernels.shape(t * 8, 128, torch.bfloat16).rows for t in (1, 600, 8192)]
    assert rows == [16, 64, 128]


@pytest.mark.parametrize("rows", [16, 64])
def test_expert_tiles_cover_every_pair_once(rows: int) -> None:
    experts, top_k = 3, 2
    ids = torch.randint(0, experts - 1, (rows + 5, top_k), device=DEVICE)  # the last gets none
    tiles = _moe_kernels.plan(ids, experts, rows)
    seen: list[int] = []
    ends, tile_ends = [0, *tiles.ends.tolist()], [0, *tiles.tile_ends.tolist()]
    for tile, expert in enumerate(tiles.tile_expert.tolist()):
        if expert == experts:
            continue
        first = ends[expert] + (tile - tile_ends[expert]) * rows
        rows_here = range(first, min(first + rows, ends[expert + 1]))
        assert len(rows_here) > 0
        pairs = tiles.order[first : first + len(rows_here)]
        assert (ids.reshape(-1)[pairs] == expert).all()
        seen += pairs.tolist()
    assert sorted(seen) == list(range(ids.numel()))


GQA = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "eps": 1e-5}


@pytest.mark.parametrize(
    "flags",
    [
        {"rope": "rope"},
        {"rope": "rope", "qk_norm": "head", "qk_norm_variant": "1p"},
        {"rope": "rope", "qk_norm": "full", "qk_norm_variant": "fp32"},
        {"qk_norm": "head"},
        {},
    ],
    ids=lambda f: "-".join(f) or "plain",
)
def test_a_model_is_the_same_with_and_without_kernels(flags: dict[str, Any]) -> None:
    norm = {"eps": 1e-5, "variant": "fp32"}
    layers = tuple(
        LayerSpec(
            (
                Branch(Node("gqa", f"{i}.a", {**GQA, **flags}), Node("rms", f"{i}.n1", norm)),
                Branch(
                    Node("mlp", f"{i}.m", {"intermediate_size": 20, "activation": "geglu_tanh"}),
                    Node("rms", f"{i}.n2", norm),
                    Node("rms", f"{i}.n3", {"eps": 1e-5, "variant": "1p"}),
                    scale=0.7,
                ),
            ),
            parallel=i == 1,
        )
        for i in range(2)
    )
    description = desc(20, 50, layers=layers, final_norm=Node("rms", "n", norm))
    ctx = context(description)
    for layer in layers:
        for branch in layer.branches:
            for node in (branch.norm, branch.op, branch.post_norm):
                if node is not None:
                    ctx.make(node)
    ctx.make(Node("rms", "n", norm))
    source = RandomSource({**shapes_of(ctx), "embed.weight": (50, 20)}, std=0.6)
    tokens = torch.randint(0, 50, (6,)).tolist()
    want = Host(description, source).prefill(tokens, [4])
    got = Host(description, source, device=DEVICE, device_facts=KERNELS).prefill(tokens, [4])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert math.isfinite(want.abs().max().item())


def test_rows_too_long_for_a_kernel_fall_back_to_torch() -> None:
    from cardcage.plugins.blocks._norms import RmsNorm

    ctx = context(desc(), facts=KERNELS)
    assert RmsNorm(ctx, "a", _kernels.MAX_ROW, 1e-5, "llama")._kernel is _kernels.rms
    assert RmsNorm(ctx, "b", _kernels.MAX_ROW + 1, 1e-5, "llama")._kernel is None
