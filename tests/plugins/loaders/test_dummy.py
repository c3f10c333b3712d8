"""Made-up weights: equal for equal seeds, well spread, and loadable into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cardcage.core.contracts import ModelNeed, ModelSource
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.plugins.loaders.dummy import Dummy, DummyOptions
from cardcage.plugins.loaders.dummy.weights import DummyWeights, fill, hashed
from tests.support.paged import Host

HOST = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def open_ref(ref: str, **options: Any) -> ModelSource:
    return Dummy().build(None, None, DummyOptions(**options)).open(ref)  # type: ignore[arg-type]


def test_references(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert Dummy().recognise(f"dummy:{path}") is not None
    assert Dummy().recognise(str(path)) is None
    by_file, by_folder = open_ref(f"dummy:{path}"), open_ref(f"dummy:{tmp_path}")
    assert by_file.revision == by_folder.revision
    assert by_file.config == CONFIG
    assert by_file.tokenizer == {}
    assert by_file.name == tmp_path.name
    assert open_ref(f"dummy:{path}", seed=7).revision != by_file.revision
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_ref(f"dummy:{path}").tokenizer["use"] == "hf"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no .*nothing"):
        open_ref(f"dummy:{tmp_path}/nothing.json")
    path = tmp_path / "q.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="'fp8'"):
        open_ref(f"dummy:{path}")
    path.write_text("{")
    with pytest.raises(CheckpointError):
        open_ref(f"dummy:{path}")


def test_values_depend_on_seed_and_name_alone() -> None:
    one, two, three = DummyWeights(1), DummyWeights(1), DummyWeights(2)
    shapes = {"a.weight": (8, 16), "b.weight": (8, 16)}
    for source in (one, two, three):
        source.expect(shapes, HOST, torch.float32)
    assert torch.equal(one.read("a.weight"), two.read("a.weight"))
    assert not torch.equal(one.read("a.weight"), one.read("b.weight"))
    assert not torch.equal(one.read("a.weight"), three.read("a.weight"))
    with pytest.raises(CheckpointError, match="not announced"):
        one.read("c")


def test_pieces_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from cardcage.plugins.loaders.dummy import weights

    whole = torch.empty(30, 20)
    fill(whole, 1, "x.weight")
    monkeypatch.setattr(weights, "_HOST_CHUNK", 64)
    pieces = torch.empty(30, 20)
    fill(pieces, 1, "x.weight")
    assert torch.equal(whole, pieces)


def in_python(counter: int, key: int) -> int:
    """The same hash on Python's integers."""
    low = 0xFFFFFFFF
    x, high = (counter * 0x9E3779B1 + key) & low, (key >> 32) & low
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        x ^= x >> shift
        x = (x * factor & low) ^ high
    x ^= x >> 16
    return x - (1 << 32) if x >> 31 else x


def test_the_golden_bits_never_change() -> None:
    key = 0x123456789ABCDEF0
    assert hashed(0, 4, key, HOST).tolist() == [-1730832488, -423723223, 502810985, -577786015]
    assert hashed(0, 99, key, HOST).tolist() == [in_python(i, key) for i in range(99)]


def test_distribution() -> None:
    out = torch.empty(512, 256)
    fill(out, 3, "m.weight")
    assert out.mean().abs() < 1e-3
    assert out.var().item() == pytest.approx(1 / 256, rel=0.02)
    bound = (3 / 256) ** 0.5
    assert out.abs().max() <= bound
    histogram = torch.histc(out, 16, -bound, bound) / out.numel()
    assert (histogram - 1 / 16).abs().max() < 2e-3
    assert torch.corrcoef(torch.stack([out[:-1].reshape(-1), out[1:].reshape(-1)]))[0, 1] < 0.01
    assert len(torch.unique(hashed(0, 1 << 16, 5, HOST))) > 65000
    norm = torch.empty(16, dtype=torch.bfloat16)
    fill(norm, 3, "model.norm.weight")
    assert norm.tolist() == [1.0] * 16
    bias = torch.empty(1000)
    fill(bias, 3, "x.bias")
    assert 0.015 < bias.abs().max() <= 0.02


def test_counters_beyond_32_bits_go_on() -> None:
    below, above = (hashed(s, s + 8, 9, HOST) for s in (0, 1 << 32))
    assert not torch.equal(below, above)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_model_loads_and_stays_finite(tmp_path: Path, architecture: str) -> None:
    config = {**CONFIG, "architectures": [architecture], "head_dim": 8}
    if architecture.startswith("Qwen3"):
        from cardcage.plugins.models.qwen3_moe import Qwen3Moe as Plugin

        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                   "model_type": "qwen3_moe"}  # fmt: skip
    else:
        from cardcage.plugins.models.llama import Llama as Plugin  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_ref(f"dummy:{tmp_path}")
    need = ModelNeed(architecture=architecture)
    desc = Plugin().build(need, None, None).describe(source.config)  # type: ignore[arg-type]
    host = Host(desc, source.open_weights())
    logits = host.prefill([1, 2, 3, 4, 5])
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
    again = Host(desc, open_ref(f"dummy:{tmp_path}").open_weights())
    assert torch.equal(again.prefill([1, 2, 3, 4, 5]), logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_the_same_weights(dtype: torch.dtype) -> None:
    made = []
    for device in ("cpu", "cuda"):
        source = DummyWeights(5)
        source.expect({"a.weight": (300, 1000)}, torch.device(device), dtype)
        tensor = source.read("a.weight")
        assert tensor.device.type == device
        made.append(tensor.cpu())
    assert torch.equal(made[0], made[1])
