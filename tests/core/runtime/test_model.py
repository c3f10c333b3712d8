"""The interpreter: residual schemes, head, cache layout, and how little it does per layer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cardcage.core.contracts import AttentionNeed, KVPart
from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Branch, HeadSpec, LayerSpec, ModelDesc, Node
from cardcage.core.runtime.layers import ModelInput
from cardcage.core.runtime.model import build_model
from cardcage.plugins.models.gemma3 import Gemma3
from cardcage.plugins.models.llama import Llama
from tests.support.building import RandomSource, context, desc, load
from tests.support.paged import Host, PlainAttention, PlainQuantizer, facts, resolver


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Add:
    """A block that adds a constant, or a multiple of x."""

    def __init__(self, constant: float, times: float) -> None:
        self.constant, self.times = constant, times

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        return x * self.times + self.constant


class AddPlugin:
    def make(self, node: Node, ctx: Any) -> Add:
        return Add(node.args.get("constant", 0.0), node.args.get("times", 0.0))


def run(layers: tuple[LayerSpec, ...], final: Node | None = None) -> float:
    """The model's output for an embedding of ones."""
    plain = resolver()

    def resolve(kind: str, need: Any, use: str = "auto", **extras: Any) -> Any:
        return AddPlugin() if kind == "blocks" else plain(kind, need, use)

    ctx = context(desc(layers=layers, final_norm=final), resolve=resolve)
    source = RandomSource({"embed.weight": (11, 16)})
    source.tensors["embed.weight"] = torch.ones(11, 16)
    model = load(ctx, source)
    out = model.forward(ModelInput(torch.tensor([1, 2]), torch.tensor([0, 1]), []))
    assert torch.equal(source.tensors["embed.weight"], torch.ones(11, 16))
    assert out.shape == (2, 16)
    return out[0, 0].item()


def add(constant: float = 0.0, times: float = 0.0) -> Node:
    return Node("add", "", {"constant": constant, "times": times})


def test_residual_schemes() -> None:
    double, plus = add(times=2.0), add(constant=5.0, times=1.0)
    assert run((LayerSpec((Branch(double),)),)) == 3.0  # 1 + 2*1
    assert run((LayerSpec((Branch(double, norm=plus),)),)) == 13.0  # 1 + 2*(1+5)
    assert run((LayerSpec((Branch(double, post_norm=plus),)),)) == 8.0  # 1 + (2*1+5)
    assert run((LayerSpec((Branch(double, scale=0.5),)),)) == 2.0
    both = (Branch(double), Branch(double, norm=plus))
    assert run((LayerSpec(both),)) == 19.0  # 3, then 3 + 2*(3+5)
    assert run((LayerSpec(both, parallel=True),)) == 15.0  # 1 + 2*1 + 2*(1+5)
    assert run((LayerSpec((Branch(double),)),) * 3) == 27.0
    assert run((), final=plus) == 6.0


def test_logits_are_scaled_then_capped() -> None:
    head = HeadSpec("head", tied=True, scale=2.0, softcap=3.0)
    model = load(context(desc(head=head)), RandomSource({"embed.weight": (11, 16)}, std=1.0))
    h = torch.randn(4, 16)
    raw = h @ model._embed.record.parts["weight"].T
    torch.testing.assert_close(model.logits(h), 3.0 * torch.tanh(2.0 * raw / 3.0))


class OddParts(PlainAttention):
    """A cache whose parts have sizes that are no multiple of the alignment."""

    def kv_parts(self) -> tuple[KVPart, ...]:
        return (*super().kv_parts(), KVPart("scale", (self.need.block_size,), "float16"))


def gemma(**changes: Any) -> ModelDesc:
    config = {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 7,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 128,
        **changes,
    }
    return Gemma3().describe(config)


def build(description: ModelDesc, attention: Any = PlainAttention, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "resolve": resolver(attention),
        "quantizer": PlainQuantizer(),
        "block_size": 5,
        "device_facts": facts(),
    }
    return build_model(description, **{**fields, **options})


def test_groups_and_offsets_cover_the_page() -> None:
    model = build(gemma(), OddParts)
    groups = model.kv_groups()
    assert [(g.kind, dict(g.options)) for g in groups] == [("window", {"window": 8}), ("full", {})]
    assert all(g.block_size == 5 for g in groups)
    assert [model.attention_keys[layer.key].group for layer in model.attention_layers] == [
        0, 0, 1, 0, 0, 1, 0
    ]  # fmt: skip
    spans: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for layer, places in zip(model.attention_layers, model.kv_offsets(), strict=True):
        assert [part.name for part, _ in places] == ["k", "v", "scale"]
        for part, offset in places:
            assert offset % 64 == 0
            size = torch.Size(part.shape).numel() * getattr(torch, part.dtype).itemsize
            spans[model.attention_keys[layer.key].group].append((offset, offset + size))
    for index, group in enumerate(groups):
        ordered = sorted(spans[index])
        assert ordered == spans[index]  # layer-major
        for (_, end), (start, _) in pairwise(ordered):
            assert 0 <= start - end < 64
        assert ordered[-1][1] <= group.page_bytes < ordered[-1][1] + 64


def test_layers_of_equal_cache_share_a_group_whatever_their_scale() -> None:
    ctx = context()
    for scale in (0.1, 0.2):
        ctx.attention("a", num_heads=2, num_kv_heads=1, head_size=8, scale=scale)
    ctx.attention("b", num_heads=2, num_kv_heads=2, head_size=8, scale=0.1)
    model = load(ctx, RandomSource({"embed.weight": (11, 16)}))
    assert [key.group for key in model.attention_keys] == [0, 0, 1]
    assert [g.name for g in model.kv_groups()] == ["full0", "full1"]


def test_needs_say_what_the_model_has() -> None:
    needs: list[AttentionNeed] = []

    def spy(need: AttentionNeed) -> PlainAttention:
        needs.append(need)
        return PlainAttention(need)

    build(gemma(), spy, dtype=torch.bfloat16, kv_format="fp8_e4m3")
    assert [n.window for n in needs] == [8, 0]
    assert {(n.dtype, n.kv_format, n.block_size, n.group_size) for n in needs} == {
        ("bfloat16", "fp8_e4m3", 5, 3)
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_compute_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match="float32"):
        build(gemma(), dtype=dtype)


def test_explain_is_plain_data() -> None:
    model = build(gemma())
    told = json.loads(json.dumps(model.explain()))
    assert told["layers"] == 7
    assert told["graph_safe"] is True
    assert [a["layers"] for a in told["attention"]] == [5, 2]


class Count(TorchDispatchMode):
    """Counts the operators that reach a device (views do not)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.kernels += 1
        return func(*args, **(kwargs or {}))


class NoAttention(PlainAttention):
    def write(self, k: Any, v: Any, cache: Any, plan: Any) -> None: ...

    def forward(self, q, cache, plan, out=None, sinks=None, lse=None):  # type: ignore[no-untyped-def]
        return q


def test_a_decode_step_is_lean() -> None:
    """Kernel launches per layer, attention aside. A time would depend on the machine."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    launches = []
    for layers in (4, 8):
        description = Llama().describe({**config, "num_hidden_layers": layers})
        host = Host(description, _random_llama(layers), attention=NoAttention)
        inp = ModelInput(torch.tensor([1]), torch.tensor([3]), [None])
        with torch.inference_mode(), Count() as count:
            host.model.forward(inp)
        launches.append(count.kernels)
    per_layer = (launches[1] - launches[0]) / 4
    # 2 norms of 6, 4 products, rotation 3, silu and product 2, residual adds 2
    assert per_layer <= 23


def _random_llama(layers: int) -> RandomSource:
    shapes = {"model.embed_tokens.weight": (17, 16), "lm_head.weight": (17, 16)}
    shapes["model.norm.weight"] = (16,)  # type: ignore[assignment]
    out: dict[str, tuple[int, ...]] = dict(shapes)
    for i in range(layers):
        p = f"model.layers.{i}"
        out |= {
            f"{p}.input_layernorm.weight": (16,),
            f"{p}.post_attention_layernorm.weight": (16,),
            f"{p}.self_attn.q_proj.weight": (16, 16),
            f"{p}.self_attn.k_proj.weight": (8, 16),
            f"{p}.self_attn.v_proj.weight": (8, 16),
            f"{p}.self_attn.o_proj.weight": (16, 16),
            f"{p}.mlp.gate_proj.weight": (16, 16),
            f"{p}.mlp.up_proj.weight": (16, 16),
            f"{p}.mlp.down_proj.weight": (16, 16),
        }
    return RandomSource(out)


def test_a_forward_pass_reads_nothing_back_to_the_host() -> None:
    """A graph can capture it: no .item(), no nonzero."""

    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.name()
            assert "_local_scalar_dense" not in name, name
            assert "nonzero" not in name, name
            return func(*args, **(kwargs or {}))

    config = {
        "vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2,
    }  # fmt: skip
    description = Llama().describe({"architectures": ["LlamaForCausalLM"], **config})
    host = Host(description, _random_llama(2), attention=NoAttention)
    inp = ModelInput(torch.tensor([1, 2]), torch.tensor([3, 4]), [None])
    with NoSync():
        host.model.logits(host.model.forward(inp))
