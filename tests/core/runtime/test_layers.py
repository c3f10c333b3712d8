"""The seams: fused linears, embeddings, parameters, attention needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cardcage.core.contracts import LinearDesc, LinearNeed, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.core.model_desc import HeadSpec
from cardcage.core.runtime.layers import BuildContext, ModelInput
from cardcage.core.runtime.weights import join_rows
from tests.support.building import RandomSource, context, desc, load, shapes_of
from tests.support.paged import DictSource, PlainAttention, PlainQuantizer, resolver


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class HalvesQuantizer(PlainQuantizer):
    """A toy packed format, "half": codes uint8 [N, K], value code / 2. `other` marks layers
    that stay plain; with `per_tensor` a scalar scale keeps components apart."""

    def __init__(self, other: tuple[str, ...] = (), per_tensor: bool = False) -> None:
        self.other = other
        self.per_tensor = per_tensor

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, torch.Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        if desc.name in self.other:
            return super().record(desc, tensors, index, dtype)
        codes = tensors[f"{desc.name}.weight"]
        assert codes.dtype == torch.uint8
        parts = {"codes": codes}
        if self.per_tensor:
            parts["scale"] = torch.tensor([0.5])
        return QuantTensor(
            "half",
            (desc.out_features, desc.in_features),
            parts,
            lambda r: r.parts["codes"].float() / 2,
            lambda r, ids: r.parts["codes"][ids].float() / 2,
        )


class HalvesKernel:
    layout_id = "half"

    def __init__(self, need: LinearNeed) -> None:
        self.need = need

    def prepare(self, record: QuantTensor, device: torch.device) -> torch.Tensor:
        weight = record.decode(record)
        record.parts.clear()  # as a kernel that repacks may do
        return weight

    def run(
        self, handle: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, handle, bias)


def halves_context(**changes: Any) -> tuple[BuildContext, list[LinearNeed]]:
    needs: list[LinearNeed] = []
    plain = resolver()

    def resolve(kind: str, need: Any, use: str = "auto", **extras: Any) -> Any:
        if kind == "linear":
            needs.append(need)
            if need.encoding == "half":
                return HalvesKernel(need)
        return plain(kind, need, use, **extras)

    return context(desc(**changes), resolve=resolve), needs


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_of_plain_weights_is_one_product(bias: bool) -> None:
    ctx = context()
    fused = ctx.linear(("a", "b", "c"), 16, (6, 2, 3), bias)
    source = RandomSource({**shapes_of(ctx), "embed.weight": (11, 16)})
    load(ctx, source)
    assert fused.encodings == ("none",)
    x = torch.randn(5, 16)
    want = torch.cat(
        [
            F.linear(x, source.tensors[f"{n}.weight"], source.tensors.get(f"{n}.bias"))
            for n in "abc"
        ],
        dim=1,
    )
    torch.testing.assert_close(fused(x), want)


def test_fused_linear_of_equal_encodings_is_one_record() -> None:
    ctx, needs = halves_context()
    fused = ctx.linear(("a", "b"), 16, (4, 6))
    source = DictSource({"a.weight": codes(4, 16), "b.weight": codes(6, 16),
                         "embed.weight": codes(11, 16)})  # fmt: skip
    load(ctx, source, HalvesQuantizer())
    assert fused.encodings == ("half",)
    assert [n for n in needs if n.out_features == 10] == [
        LinearNeed(encoding="half", in_features=16, out_features=10)
    ]
    x = torch.randn(2, 16)
    weight = torch.cat([source.tensors["a.weight"], source.tensors["b.weight"]]).float() / 2
    torch.testing.assert_close(fused(x), x @ weight.T)


@pytest.mark.parametrize("mix", ["encodings", "per-tensor"])
def test_components_that_cannot_join_run_apart(mix: str) -> None:
    ctx, _ = halves_context()
    fused = ctx.linear(("a", "b"), 16, (4, 6), bias=True)
    b = torch.randn(6, 16) if mix == "encodings" else codes(6, 16)
    tensors = {"a.weight": codes(4, 16), "b.weight": b, "embed.weight": torch.randn(11, 16)}
    source = DictSource({**tensors, "a.bias": torch.randn(4), "b.bias": torch.randn(6)})
    other = ("b", "embed") if mix == "encodings" else ("embed",)
    load(ctx, source, HalvesQuantizer(other, per_tensor=mix == "per-tensor"))
    assert len(fused.encodings) == 2
    x = torch.randn(3, 16)
    weights = [source.tensors["a.weight"].float() / 2, b if mix == "encodings" else b.float() / 2]
    want = torch.cat(
        [F.linear(x, w, source.tensors[f"{n}.bias"]) for w, n in zip(weights, "ab", strict=True)],
        dim=1,
    )
    torch.testing.assert_close(fused(x), want)


def test_join_rows_needs_a_row_per_output() -> None:
    def record(rows: int, parts: dict[str, torch.Tensor], encoding: str = "e") -> QuantTensor:
        return QuantTensor(encoding, (rows, 8), parts, lambda r: None, lambda r, i: None)  # type: ignore[arg-type, return-value]

    def joined(*records: QuantTensor) -> int:
        return len(join_rows(list(records)))

    assert joined(record(2, {"w": codes(2, 8)}), record(3, {"w": codes(3, 8)})) == 1
    assert joined(record(2, {"w": codes(2, 8)}), record(3, {"w": codes(3, 8)}, "f")) == 2
    assert joined(record(2, {"w": codes(2, 8)}), record(3, {"v": codes(3, 8)})) == 2
    assert joined(record(2, {"w": codes(2, 8)}), record(3, {"w": codes(3, 9)})) == 2
    assert joined(record(2, {"w": codes(1, 8)}), record(3, {"w": codes(1, 8)})) == 2
    assert joined(record(2, {"w": codes(2, 8)}), record(3, {"w": codes(3, 8).float()})) == 2
    assert joined(record(1, {"w": torch.tensor(0.5)}), record(1, {"w": torch.tensor(0.5)})) == 2


def test_a_linear_before_loading_says_so() -> None:
    with pytest.raises(RuntimeError, match="load_weights"):
        context().linear("a", 4, 4)(torch.zeros(1, 4))


def test_tied_head_shares_the_embedding_storage() -> None:
    model = load(context(), RandomSource({"embed.weight": (11, 16)}))
    assert model._head._handle.data_ptr() == model._embed.record.parts["weight"].data_ptr()
    h = torch.randn(2, 16)
    torch.testing.assert_close(model.logits(h), h @ model._embed.record.parts["weight"].T)


def test_packed_embedding_decodes_the_wanted_rows_even_after_the_head_repacked() -> None:
    ctx, _ = halves_context(embed_scale=3.0)
    source = DictSource({"embed.weight": codes(11, 16)})
    model = load(ctx, source, HalvesQuantizer())
    ids = torch.tensor([3, 3, 10])
    want = source.tensors["embed.weight"][ids].float() / 2
    torch.testing.assert_close(model._embed(ids), want * 3.0)
    h = torch.randn(2, 16)
    torch.testing.assert_close(model.logits(h), h @ (source.tensors["embed.weight"].float() / 2).T)


def test_embedding_scale_is_rounded_to_the_dtype_first() -> None:
    scale = 48**0.5  # 6.9282; bfloat16 has 6.9375
    table = torch.full((11, 16), 1.0)
    for in_dtype, want in ((True, 6.9375), (False, scale)):
        ctx = context(desc(embed_scale=scale, embed_scale_in_dtype=in_dtype), torch.bfloat16)
        model = load(ctx, DictSource({"embed.weight": table}))
        got = model._embed(torch.tensor([0]))
        assert got.dtype == torch.bfloat16
        assert got[0, 0].item() == torch.tensor(want).to(torch.bfloat16).item()
        assert torch.equal(table, torch.ones_like(table))  # the table itself is not scaled


def test_untied_head_with_bias() -> None:
    ctx = context(desc(head=HeadSpec("head", tied=False, bias=True)))
    shapes = {"embed.weight": (11, 16), "head.weight": (11, 16), "head.bias": (11,)}
    source = RandomSource(shapes)
    h = torch.randn(2, 16)
    want = F.linear(h, source.tensors["head.weight"], source.tensors["head.bias"])
    torch.testing.assert_close(load(ctx, source).logits(h), want)


def test_params() -> None:
    ctx = context(dtype=torch.bfloat16)
    plain = ctx.param("p", 4)
    wide = ctx.param("w", (4,), torch.float32, transform=lambda t: t + 1)
    absent = ctx.param("gone", 4, optional=True)
    tensors = {"p": torch.randn(4), "w": torch.randn(4), "embed.weight": torch.randn(11, 16)}
    load(ctx, DictSource(tensors))
    assert plain.tensor is not None
    assert plain.tensor.dtype == torch.bfloat16
    assert wide.tensor is not None
    torch.testing.assert_close(wide.tensor, tensors["w"] + 1)
    assert absent.tensor is None


def test_equal_attention_needs_share_a_backend() -> None:
    ctx = context()
    args: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.25}
    layers = [ctx.attention(f"l{i}", window=w, **args) for i, w in enumerate((0, 8, 0, 8))]
    assert [layer.key for layer in layers] == [0, 1, 0, 1]
    assert layers[0].backend is layers[2].backend
    need = ctx.attention_keys[1].need
    assert need.group_size == 2
    assert need.value_size == 8
    assert need.features == {"prefix", "mixed", "window"}
    assert ctx.attention_keys[0].need.features == {"prefix", "mixed"}
    with pytest.raises(UnsupportedModel, match="multiple"):
        ctx.attention("x", num_heads=4, num_kv_heads=3, head_size=8, scale=1.0)


def test_attention_writes_then_reads_with_the_plan_of_its_key() -> None:
    calls: list[Any] = []

    class Spy(PlainAttention):
        def write(self, k: Any, v: Any, cache: Any, plan: Any) -> None:
            calls.append(("write", cache, plan))

        def forward(self, q, cache, plan, out=None, sinks=None, lse=None):  # type: ignore[no-untyped-def]
            calls.append(("forward", cache, plan, sinks))
            return q

    ctx = context(resolve=resolver(Spy))
    ctx.attention("a", num_heads=2, num_kv_heads=2, head_size=8, scale=1.0)
    sinks = ctx.param("sinks", 2, torch.float32)
    layer = ctx.attention("b", num_heads=2, num_kv_heads=2, head_size=8, scale=1.0, sinks=sinks)
    load(ctx, RandomSource({"sinks": (2,), "embed.weight": (11, 16)}))
    layer.cache = (torch.zeros(1),)
    x = torch.zeros(3, 2, 8)
    layer(x, x, x, ModelInput(torch.zeros(3), torch.arange(3), ["plan a", "plan b"]))
    assert calls == [
        ("write", layer.cache, "plan b"),
        ("forward", layer.cache, "plan b", sinks.tensor),
    ]


def test_build_mistakes_are_named() -> None:
    ctx = context()
    ctx.linear("a", 4, 4)
    with pytest.raises(CheckpointError, match="'a'"):
        ctx.linear("a", 4, 4)
    with pytest.raises(UnsupportedModel, match=r"'local'.*rope"):
        ctx.rope("local")
    assert ctx.rope("rope") is ctx.rope("rope")
