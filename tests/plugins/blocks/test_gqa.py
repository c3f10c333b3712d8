"""Grouped-query attention: each flag against a dense formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Branch, LayerSpec, Node, RopeSpec
from cardcage.core.runtime.rope import Rope
from cardcage.plugins.blocks._norms import rms_reference
from tests.support.building import RandomSource, context, desc, shapes_of
from tests.support.paged import Host

HIDDEN, VOCAB = 20, 50
BASE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}


def dense(t: dict[str, torch.Tensor], x: torch.Tensor, a: dict[str, Any]) -> torch.Tensor:
    """The whole block on x [T, HIDDEN], one causal sequence from position 0."""
    heads, kv, size = a["num_heads"], a["num_kv_heads"], a["head_size"]

    def product(name: str, y: torch.Tensor) -> torch.Tensor:
        out = y @ t[f"a.{name}.weight"].double().T
        return out + t[f"a.{name}.bias"].double() if f"a.{name}.bias" in t else out

    x = x.double()
    if a.get("fused_qkv"):
        q, k, v = product("qkv_proj", x).split([heads * size, kv * size, kv * size], -1)
    else:
        q, k, v = (product(f"{n}_proj", x) for n in "qkv")
    tokens = len(x)
    if a.get("qk_norm") == "full":
        q, k = norm(t, "q", q, a), norm(t, "k", k, a)
    q, k, v = q.view(tokens, heads, size), k.view(tokens, kv, size), v.view(tokens, kv, size)
    if a.get("qk_norm") == "head":
        q, k = norm(t, "q", q, a), norm(t, "k", k, a)
    if a.get("rope"):
        rope = Rope(RopeSpec(dim=8, theta=10000.0), 0, torch.device("cpu"), 64)
        q, k = rope(q.float(), k.float(), torch.arange(tokens))
    q, k = q.double(), k.double().repeat_interleave(heads // kv, 1)
    v = v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * a.get("scale", size**-0.5)
    if a.get("softcap"):
        scores = a["softcap"] * torch.tanh(scores / a["softcap"])
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    visible = (j <= i) & (j > i - (a.get("window") or math.inf))
    scores = scores.masked_fill(~visible, -math.inf)
    if a.get("sinks"):
        column = t["a.sinks"].double().view(-1, 1, 1).expand(-1, tokens, 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return product("o_proj", torch.einsum("hqk,khd->qhd", probs, v).reshape(tokens, -1))


def norm(t: dict[str, torch.Tensor], which: str, x: torch.Tensor, a: dict[str, Any]) -> Any:
    variant = a.get("qk_norm_variant", "llama")
    return rms_reference(x.float(), t[f"a.{which}_norm.weight"], a["eps"], variant).double()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"rope": "rope"},
        {"rope": "rope", "qkv_bias": True, "o_bias": True},
        {"rope": "rope", "fused_qkv": True, "qkv_bias": True},
        {"rope": "rope", "qk_norm": "head", "eps": 1e-4},
        {"qk_norm": "head", "qk_norm_variant": "1p", "eps": 1e-4},
        {"rope": "rope", "qk_norm": "full", "qk_norm_variant": "fp32", "eps": 1e-4},
        {"rope": "rope", "window": 5, "scale": 0.11},
        {"rope": "rope", "softcap": 2.0, "scale": 1.0},
        {"rope": "rope", "sinks": True, "window": 7},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "rope": "rope"},
    ],
    ids=lambda f: "-".join(f) or "plain",
)
def test_equals_the_dense_formula(flags: dict[str, Any]) -> None:
    args = {**BASE, **flags}
    node = Node("gqa", "a", args)
    description = desc(HIDDEN, VOCAB, layers=(LayerSpec((Branch(node),)),))
    ctx = context(description)
    ctx.make(node)
    shapes = {**shapes_of(ctx), "embed.weight": (VOCAB, HIDDEN)}
    source = RandomSource(shapes, std=0.6)
    host = Host(description, source)
    ids = torch.randint(0, VOCAB, (18,)).tolist()
    x = source.tensors["embed.weight"][ids]
    want = (x.double() + dense(source.tensors, x, args)) @ source.tensors["embed.weight"].double().T
    for chunks in ([], [4, 1, 9]):
        got = host.prefill(ids, chunks)
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"qk_norm": "both"}, "both"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"rope": "elsewhere"}, "elsewhere"),
        ({"gate": True}, "gate"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        context().make(Node("gqa", "a", {**BASE, **changes}))
