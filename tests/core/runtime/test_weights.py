"""The weight plan: both directions checked before a byte is read, tied weights, progress."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from cardcage.core.contracts import TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.core.runtime.model import Model, build_model, load_weights
from cardcage.core.runtime.weights import PlanItem, check, make_plan, rename
from cardcage.plugins.models.llama import Llama
from cardcage.plugins.models.mixtral import Mixtral
from tests.support.paged import DictSource, PlainQuantizer, facts, resolver


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def built(plugin: Any = None, **changes: Any) -> Model:
    return build_model(
        (plugin or Llama()).describe({**CONFIG, **changes}),
        device=torch.device("cpu"),
        dtype=torch.float32,
        resolve=resolver(),
        quantizer=PlainQuantizer(),
        block_size=4,
        device_facts=facts(),
    )


def tensors(model: Model) -> dict[str, torch.Tensor]:
    """A complete checkpoint, by the model's own plan."""
    everything = {name: TensorMeta((), "float32", 0) for name in _names(model, {})}
    out = {}
    for item in make_plan(model, everything):
        for name, shape in item.shapes.items():
            out[name] = torch.randn(shape)
    return out


def _names(model: Model, index: dict[str, TensorMeta]) -> list[str]:
    return [n for item in make_plan(model, index) for n in item.sources if not item.optional]


def test_a_complete_checkpoint_loads_with_progress() -> None:
    model = built()
    source = DictSource(tensors(model))
    seen: list[tuple[str, int, int]] = []
    load_weights(model, source, lambda *args: seen.append(args))
    total = sum(t.numel() * 4 for t in source.tensors.values())
    assert seen[0] == ("weights", 0, total)
    assert seen[-1] == ("weights", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert sorted(source.reads) == sorted(source.tensors)  # each tensor once


def test_every_mismatch_is_named_and_nothing_is_read() -> None:
    model = built()
    good = tensors(model)
    good.pop("model.layers.1.mlp.up_proj.weight")
    good.pop("model.layers.0.input_layernorm.weight")
    good["model.layers.0.self_attn.k_proj.weight"] = torch.randn(16, 16)
    good["model.norm.weight"] = torch.randn(15)
    good["model.layers.2.mlp.up_proj.weight"] = torch.randn(24, 16)
    good["model.layers.0.self_attn.q_proj.bias"] = torch.randn(16)
    source = DictSource(good)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, source)
    said = str(caught.value)
    assert "2 missing" in said
    assert "model.layers.1.mlp.up_proj.weight" in said
    assert "2 unexpected" in said
    assert "model.layers.2.mlp.up_proj.weight" in said
    assert "model.layers.0.self_attn.q_proj.bias" in said
    assert "2 of the wrong shape" in said
    assert "k_proj.weight: has [16, 16], the model needs [8, 16]" in said
    assert source.reads == []


def test_long_lists_are_cut_with_their_count() -> None:
    with pytest.raises(CheckpointError, match=r"20 missing(.|\n)*and 12 more"):
        check([PlanItem("x", tuple(f"t{i}" for i in range(20)))], {})


def test_drops_and_optionals() -> None:
    meta = TensorMeta((1,), "float32", 4)
    plan = [PlanItem("a", ("a",)), PlanItem("b", ("b",), optional=True)]
    check(plan, {"a": meta})
    check(plan, {"a": meta, "l.0.rotary_emb.inv_freq": meta, "mtp.x": meta}, drop=(r"^mtp\.",))
    with pytest.raises(CheckpointError, match=r"unexpected(.|\n)*mtp\.x"):
        check(plan, {"a": meta, "mtp.x": meta})


def test_aliases_rename_and_collide() -> None:
    meta = TensorMeta((1,), "float32", 4)
    names, index = rename({"m.mlp.x": meta, "y": meta}, ((r"\.mlp\.", ".moe."),))
    assert names == {"m.moe.x": "m.mlp.x", "y": "y"}
    assert set(index) == {"m.moe.x", "y"}
    with pytest.raises(CheckpointError, match=r"m\.moe\.x.*both|both mean 'm\.moe\.x'"):
        rename({"m.mlp.x": meta, "m.moe.x": meta}, ((r"\.mlp\.", ".moe."),))


@pytest.mark.parametrize("equal", [True, False])
def test_an_lm_head_beside_tied_weights(equal: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = built()
    good = tensors(model)
    head = good["model.embed_tokens.weight"].clone()
    good["lm_head.weight"] = head if equal else head + 1
    with caplog.at_level(logging.WARNING, "cardcage.weights"):
        load_weights(model, DictSource(good))
    assert ("lm_head.weight differs" in caplog.text) is not equal
    h = torch.randn(1, 16)
    torch.testing.assert_close(model.logits(h), h @ good["model.embed_tokens.weight"].T)


def test_untied_needs_its_head() -> None:
    model = built(tie_word_embeddings=False)
    good = tensors(model)
    assert "lm_head.weight" in good
    good.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"missing(.|\n)*lm_head\.weight"):
        load_weights(model, DictSource(good))


class Packed(DictSource):
    """Says that one tensor is packed."""

    def __init__(self, tensors: dict[str, torch.Tensor], packed: str) -> None:
        super().__init__(tensors)
        self.packed = packed

    def index(self) -> dict[str, TensorMeta]:
        index = super().index()
        old = index[self.packed]
        index[self.packed] = TensorMeta(old.shape, "packed", old.nbytes, "gguf:q4_0")
        return index


def test_a_packed_norm_is_refused_by_name() -> None:
    model = built()
    source = Packed(tensors(model), "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*gguf:q4_0"):
        load_weights(model, source)


def test_weights_may_come_in_another_dtype() -> None:
    model = built()
    good = tensors(model)
    load_weights(model, DictSource({k: v.double() for k, v in good.items()}))
    h = torch.randn(1, 16)
    torch.testing.assert_close(model.logits(h), h @ good["model.embed_tokens.weight"].T)
    assert model._embed.record.parts["weight"].dtype == torch.float32


def test_expert_layouts_in_the_plan() -> None:
    model = built(Mixtral(), num_local_experts=2, tie_word_embeddings=False)
    bank = "model.layers.0.block_sparse_moe.experts"
    assert f"{bank}.1.gate_proj.weight" in _names(model, {})
    model = built(Mixtral(), num_local_experts=2, tie_word_embeddings=False)
    meta = TensorMeta((), "float32", 0)
    assert f"{bank}.1.w3.weight" in _names(model, {f"{bank}.0.w1.weight": meta})
    model = built(Mixtral(), num_local_experts=2, tie_word_embeddings=False)
    plan = make_plan(model, {f"{bank}.down_proj": meta})
    (item,) = [i for i in plan if i.dest == bank and i.component == "w13"]
    assert item.shapes == {f"{bank}.gate_up_proj": (2, 48, 16)}
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        check([item], {})
