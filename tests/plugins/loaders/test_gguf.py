"""GGUF files: the real one, one of each architecture, and every way of being broken."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import ModelSource
from cardcage.core.errors import CheckpointError, ModelError, UnsupportedModel
from cardcage.plugins.loaders.gguf import Gguf
from cardcage.plugins.loaders.gguf import reader as gguf_reader
from cardcage.plugins.loaders.gguf.config import short_float
from tests.support import gguf_files as g


def open_ref(path: Path) -> ModelSource:
    return Gguf().build(None, None, None).open(str(path))  # type: ignore[arg-type]


def values(source: ModelSource, name: str) -> torch.Tensor:
    return source.open_weights().read(name)


def test_recognises_files_by_suffix(tmp_path: Path) -> None:
    path = g.write(tmp_path / "m.gguf", g.llama(), g.layer())
    match = Gguf().recognise(str(path))
    assert match is not None
    assert match.score == 90
    missing = Gguf().recognise("nowhere/m.gguf")
    assert missing is not None
    assert missing.score < 50
    assert Gguf().recognise("org/name") is None
    assert Gguf().recognise("pypi:dist/m.gguf") is None
    with pytest.raises(ModelError, match="no such file"):
        open_ref(tmp_path / "other.gguf")


# ---- the real file ----------------------------------------------------------------------------


def test_config_of_the_embedded_model(smollm2_path: Path) -> None:
    source = open_ref(smollm2_path)
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    want = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    assert {k: source.config[k] for k in want} == want
    assert source.quant_method == "gguf"
    assert source.tokenizer["use"] == "gguf"
    assert source.revision == open_ref(smollm2_path).revision


@pytest.mark.slow
def test_tensors_of_the_embedded_model_equal_the_gguf_package(smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weights = open_ref(smollm2_path).open_weights()
    index = weights.index()
    assert len(index) == 272
    stored = {t.name: t for t in gguf.GGUFReader(str(smollm2_path)).tensors}
    down = index["model.layers.7.mlp.down_proj.weight"]
    assert (down.shape, down.dtype, down.encoding) == ((576, 1536), "packed", "gguf:q4_1")
    got = weights.read("model.layers.7.mlp.down_proj.weight").numpy()
    np.testing.assert_array_equal(got, stored["blk.7.ffn_down.weight"].data)
    q = weights.read("model.layers.7.self_attn.q_proj.weight").numpy()
    rows = stored["blk.7.attn_q.weight"].data
    for head in range(9):
        for j in range(2):
            for i in range(32):  # stored row 2 i + j of a head is row 32 j + i of the model
                np.testing.assert_array_equal(
                    q[head * 64 + 32 * j + i], rows[head * 64 + 2 * i + j]
                )
    norm = weights.read("model.layers.7.input_layernorm.weight")
    np.testing.assert_array_equal(norm.numpy(), stored["blk.7.attn_norm.weight"].data)


# ---- architectures ------------------------------------------------------------------------------


def test_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), g.layer()))
    for part, heads in (("q", 4), ("k", 2)):
        raw = next(t for t in g.layer() if f"attn_{part}." in t[0])[3]
        stored = np.frombuffer(raw, np.uint8).reshape(heads * 8, 18)
        got = values(source, f"model.layers.0.self_attn.{part}_proj.weight").numpy()
        for head in range(heads):
            for j in range(2):
                for i in range(4):  # stored row 2 i + j of a head is the model's 4 j + i
                    row = stored[head * 8 + 2 * i + j]
                    np.testing.assert_array_equal(got[head * 8 + 4 * j + i], row)


def test_llama_names_and_views(tmp_path: Path) -> None:
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), g.layer()))
    index = source.open_weights().index()
    prefix = "model.layers.0."
    assert set(index) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        f"{prefix}input_layernorm.weight",
        f"{prefix}post_attention_layernorm.weight",
        *(f"{prefix}self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    assert values(source, f"{prefix}mlp.up_proj.weight").shape == (64, 18)
    assert source.config["tie_word_embeddings"] is True
    assert source.name == "m"


def test_an_output_head_unties(tmp_path: Path) -> None:
    tensors = [*g.layer(), g.tensor("output.weight", (16, 32), "f16")]
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), tensors))
    assert source.config["tie_word_embeddings"] is False
    assert source.open_weights().index()["lm_head.weight"].dtype == "float16"
    assert values(source, "lm_head.weight").dtype == torch.float16


def test_biases_of_permuted_rows_move_too(tmp_path: Path) -> None:
    bias = ("blk.0.attn_k.bias", (16,), "f32", np.arange(16, dtype="<f4").tobytes())
    tensors = [*g.layer(), bias, g.tensor("blk.0.attn_q.bias", (32,))]
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), tensors))
    got = values(source, "model.layers.0.self_attn.k_proj.bias")
    assert got.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert source.config["attention_bias"] is True


@pytest.mark.parametrize("stacked", [True, False])
def test_mixtral_experts(tmp_path: Path, stacked: bool) -> None:
    parts = [("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64))]
    if stacked:
        banks = [g.tensor(f"blk.0.ffn_{p}_exps.weight", (3, *s), "q4_0") for p, s in parts]
    else:
        banks = [
            g.tensor(f"blk.0.ffn_{p}.{e}.weight", s, "q4_0", e) for p, s in parts for e in range(3)
        ]
    tensors = [t for t in g.layer() if ".ffn_" not in t[0] or "norm" in t[0]]
    tensors += [*banks, g.tensor("blk.0.ffn_gate_inp.weight", (3, 32))]
    metadata = g.llama(expert_count=3, expert_used_count=2)
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, tensors))
    assert source.config["architectures"] == ["MixtralForCausalLM"]
    assert (source.config["num_local_experts"], source.config["num_experts_per_tok"]) == (3, 2)
    index = source.open_weights().index()
    moe = "model.layers.0.block_sparse_moe"
    assert index[f"{moe}.gate.weight"].shape == (3, 32)
    assert index[f"{moe}.experts.2.w2.weight"].shape == (32, 64)
    assert index[f"{moe}.experts.2.w2.weight"].nbytes == 32 * 2 * 18
    raw = next(t for t in banks if "down" in t[0] and (stacked or ".2." in t[0]))[3]
    got = values(source, f"{moe}.experts.2.w2.weight").numpy().tobytes()
    assert got == raw[-32 * 2 * 18 :]


def test_qwen3moe(tmp_path: Path) -> None:
    metadata = g.llama("qwen3moe", expert_count=2, expert_used_count=1,
                       expert_feed_forward_length=64, attention__key_length=16)  # fmt: skip
    tensors = [
        g.tensor("token_embd.weight", (16, 32)),
        g.tensor("blk.0.attn_q.weight", (64, 32)),
        g.tensor("blk.0.attn_q_norm.weight", (16,)),
        g.tensor("blk.0.ffn_gate_inp.weight", (2, 32)),
        g.tensor("blk.0.ffn_up_exps.weight", (2, 64, 32)),
    ]
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, tensors))
    want = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
            "head_dim": 16, "norm_topk_prob": True}  # fmt: skip
    assert {k: source.config[k] for k in want} == want
    index = source.open_weights().index()
    assert index["model.layers.0.mlp.experts.1.up_proj.weight"].shape == (64, 32)
    assert "model.layers.0.mlp.gate.weight" in index
    assert "model.layers.0.self_attn.q_norm.weight" in index
    # no permutation outside the llama family
    raw = np.frombuffer(tensors[1][3], "<f4").reshape(64, 32)
    np.testing.assert_array_equal(
        values(source, "model.layers.0.self_attn.q_proj.weight").numpy(), raw
    )


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemma(tmp_path: Path, arch: str) -> None:
    metadata = g.llama(arch, block_count=6, attention__sliding_window=16,
                       attention__key_length=8, attention__value_length=8)  # fmt: skip
    norms = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    tensors = [g.tensor("token_embd.weight", (16, 32))]
    tensors += [g.tensor(f"blk.0.{n}.weight", (32,)) for n in norms]
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, tensors))
    for stored, name in norms.items():
        raw = next(t for t in tensors if f".{stored}." in t[0])[3]
        want = torch.frombuffer(bytearray(raw), dtype=torch.float32) - 1
        assert torch.equal(values(source, f"model.layers.0.{name}.weight"), want)
    kinds = [t.removesuffix("_attention") for t in source.config["layer_types"]]
    if arch == "gemma2":
        assert kinds == ["sliding", "full"] * 3
        assert source.config["attn_logit_softcapping"] == 50.0
    else:
        assert kinds == ["sliding"] * 5 + ["full"]
        assert source.config["rope_local_base_freq"] == 10000.0
    assert source.config["query_pre_attn_scalar"] == 8
    assert source.config["hidden_activation"] == "gelu_pytorch_tanh"


def test_phi3_fused_tensors_and_longrope(tmp_path: Path) -> None:
    metadata = g.llama("phi3", rope__dimension_count=6,
                       rope__scaling__original_context_length=64)  # fmt: skip
    tensors = [
        g.tensor("token_embd.weight", (16, 32)),
        g.tensor("blk.0.attn_qkv.weight", (64, 32)),
        g.tensor("blk.0.ffn_up.weight", (128, 32)),
        ("rope_factors_long.weight", (3,), "f32", np.array([1, 2.5, 4], "<f4").tobytes()),
        ("rope_factors_short.weight", (3,), "f32", np.array([1, 1.1, 1.2], "<f4").tobytes()),
    ]
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, tensors))
    assert source.config["partial_rotary_factor"] == 0.75
    assert source.config["original_max_position_embeddings"] == 64
    scaling = source.config["rope_scaling"]
    assert scaling == {"rope_type": "longrope", "long_factor": [1, 2.5, 4],
                       "short_factor": [1, 1.1, 1.2]}  # fmt: skip
    assert set(source.open_weights().index()) == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
    }


def test_olmo2_and_qwen(tmp_path: Path) -> None:
    norm = g.tensor("blk.0.post_ffw_norm.weight", (32,))
    tensors = [g.tensor("token_embd.weight", (16, 32)), norm]
    source = open_ref(g.write(tmp_path / "o.gguf", g.llama("olmo2"), tensors))
    name = "model.layers.0.post_feedforward_layernorm.weight"
    assert values(source, name).numpy().tobytes() == norm[3]  # no offset outside gemma
    for arch, model in (("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")):
        path = g.write(tmp_path / f"{arch}.gguf", g.llama(arch), g.layer())
        assert open_ref(path).config["architectures"] == [model]


def llama3_table(factor: float, dim: int = 8, theta: float = 500000.0) -> np.ndarray[Any, Any]:
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = (8192 / wavelength - 1) / 3
    table = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 2048, 1.0, np.where(wavelength > 8192, factor, table)).astype(
        "<f4"
    )


def test_llama3_rope_is_recovered_or_refused(tmp_path: Path) -> None:
    table = llama3_table(8.0)
    rope = ("rope_freqs.weight", (4,), "f32", table.tobytes())
    metadata = g.llama(rope__freq_base=500000.0)
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, [*g.layer(), rope]))
    scaling = source.config["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 8.0
    odd = ("rope_freqs.weight", (4,), "f32", np.array([1, 3, 2, 8], "<f4").tobytes())
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_ref(g.write(tmp_path / "n.gguf", g.llama(), [*g.layer(), odd]))


def test_other_rope_scalings(tmp_path: Path) -> None:
    def scaling(**keys: Any) -> Any:
        path = tmp_path / "m.gguf"
        return open_ref(g.write(path, g.llama(**keys), g.layer())).config["rope_scaling"]

    assert scaling() is None
    linear = scaling(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear == {"rope_type": "linear", "factor": 4.0}
    yarn = scaling(rope__scaling__type="yarn", rope__scaling__factor=4.0,
                   rope__scaling__original_context_length=32)  # fmt: skip
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match="odd"):
        scaling(rope__scaling__type="odd")


def test_refusals_name_what_is_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama"):
        open_ref(g.write(path, g.llama("mamba"), g.layer()))
    metadata = g.llama(attention__head_count=[4, 2])
    with pytest.raises(UnsupportedModel, match="differs by layer"):
        open_ref(g.write(path, metadata, g.layer()))
    with pytest.raises(CheckpointError, match="block_count"):
        open_ref(g.write(path, g.llama(block_count=None), g.layer()))
    with pytest.raises(ModelError, match="split"):
        open_ref(g.write(path, {**g.llama(), "split.count": 2}, g.layer()))
    metadata = g.llama(attention__key_length=8, attention__value_length=4)
    with pytest.raises(UnsupportedModel, match="key and value heads"):
        open_ref(g.write(path, metadata, g.layer()))


def test_short_float() -> None:
    assert short_float(struct.unpack("<f", struct.pack("<f", 1e-5))[0]) == 1e-5
    assert short_float(struct.unpack("<f", struct.pack("<f", 0.1))[0]) == 0.1
    assert short_float(500000.0) == 500000.0
    exact = struct.unpack("<f", struct.pack("<f", 1.2345678))[0]
    assert struct.pack("<f", short_float(exact)) == struct.pack("<f", exact)


# ---- broken files -------------------------------------------------------------------------------


def test_every_cut_is_a_checkpoint_error(tmp_path: Path) -> None:
    metadata = {**g.llama(), "tokenizer.ggml.tokens": ["a", "bc", "d"], "general.alignment": 32}
    whole = g.dump(metadata, g.layer()[:3])
    header = whole.index(b"blk.0.attn_norm.weight") + 60
    cuts = [*range(0, header, 3), *range(header, len(whole), 497), len(whole) - 1]
    path = tmp_path / "m.gguf"
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            open_ref(path)


def test_flipped_bytes_never_hang_or_allocate(tmp_path: Path) -> None:
    whole = bytearray(g.dump({**g.llama(), "tokenizer.ggml.tokens": ["a", "b"]}, g.layer()))
    end = bytes(whole).index(b"blk.0.ffn_down.weight") + 50
    rng = random.Random(1)
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    try:
        for _ in range(250):
            at = rng.randrange(end)
            broken = bytearray(whole)
            broken[at] = rng.choice((0, 0x7F, 0xFF, broken[at] ^ 1 << rng.randrange(8)))
            path.write_bytes(broken)
            try:
                weights = open_ref(path).open_weights()
                for name in weights.index():
                    weights.read(name)
            except ModelError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"magic": b"GGML"}, "b'GGML'"),
        ({"version": 1}, "version 1"),
        ({"version": 0x03000000}, "big-endian"),
        ({"counts": (1 << 60, 1)}, "claims"),
        ({"counts": (1, 1 << 60)}, "claims"),
    ],
)
def test_wrong_headers(tmp_path: Path, lies: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_ref(g.write(tmp_path / "m.gguf", g.llama(), g.layer(), **lies))


def test_absurd_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for body in (
        struct.pack("<Q", 1 << 62),  # key
        g.text("k") + struct.pack("<IQ", 8, 1 << 40),  # string
        g.text("k") + struct.pack("<IIQ", 9, 4, 1 << 61),  # array of numbers
        g.text("k") + struct.pack("<IIQ", 9, 8, 1 << 61),  # array of strings
        g.text("k") + struct.pack("<II", 9, 9) * 9 + struct.pack("<Q", 1),  # nested arrays
        g.text("k") + struct.pack("<I", 99),  # unknown value type
    ):
        path.write_bytes(head + body + b"\0" * 64)
        with pytest.raises(CheckpointError):
            open_ref(path)


def test_a_large_sparse_file_with_a_huge_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.text("k")
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 30))
    with path.open("r+b") as file:
        file.truncate(3 << 30)
    with pytest.raises(CheckpointError, match="at most"):
        open_ref(path)


def test_wrong_tensor_tables(tmp_path: Path) -> None:
    path, metadata = tmp_path / "m.gguf", g.llama()
    twice = g.tensor("output_norm.weight", (32,))
    with pytest.raises(CheckpointError, match="occurs twice"):
        open_ref(g.write(path, metadata, [*g.layer(), twice]))
    with pytest.raises(CheckpointError, match=r"type 17 \(iq2_xs\)"):
        open_ref(g.write(path, metadata, [("a", (32,), "17", b"\0" * 64)]))
    with pytest.raises(CheckpointError, match=r"type 77 \(unknown\)"):
        open_ref(g.write(path, metadata, [("a", (32,), "77", b"\0" * 64)]))
    with pytest.raises(CheckpointError, match="33 elements"):
        open_ref(g.write(path, metadata, [("a", (2, 33), "q4_0", b"\0" * 64)]))
    with pytest.raises(CheckpointError, match="5 dims"):
        open_ref(g.write(path, metadata, [("a", (1, 1, 1, 1, 1), "f32", b"\0" * 64)]))
    with pytest.raises(CheckpointError, match="empty"):
        open_ref(g.write(path, metadata, [("a", (0, 32), "f32", b"")]))
    with pytest.raises(CheckpointError, match="ends at byte"):
        open_ref(g.write(path, metadata, [("a", (1 << 40, 1 << 20), "f32", b"\0")]))
    with pytest.raises(CheckpointError, match="alignment"):
        open_ref(g.write(path, {**metadata, "general.alignment": 24}, g.layer()))
    overlapping = [("a", (64,), "f32", b"\0" * 32), ("b", (8,), "f32", b"\0" * 512)]
    with pytest.raises(CheckpointError, match="overlap"):
        open_ref(g.write(path, metadata, overlapping))
    both = [g.tensor("blk.0.ffn_up.0.weight", (64, 32)),
            g.tensor("blk.0.ffn_up_exps.weight", (2, 64, 32))]  # fmt: skip
    metadata = g.llama(expert_count=2, expert_used_count=1)
    with pytest.raises(CheckpointError, match="both stand for"):
        open_ref(g.write(path, metadata, [g.tensor("token_embd.weight", (16, 32)), *both]))


def test_duplicate_metadata_key(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    pair = g.text("k") + g.value(1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair)
    with pytest.raises(CheckpointError, match="'k' occurs twice"):
        open_ref(path)


@pytest.mark.parametrize("align", [1, 2, 64])
def test_any_power_of_two_alignment(tmp_path: Path, align: int) -> None:
    metadata = {**g.llama(), "general.alignment": align, "x": "y" * 3}
    tensors = g.layer()
    source = open_ref(g.write(tmp_path / "m.gguf", metadata, tensors, align=align))
    got = values(source, "model.norm.weight")
    assert got.numpy().tobytes() == tensors[1][3]
    assert got.shape == (32,)


def test_reader_against_the_gguf_package_writer(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_float64("pi", 3.141592653589793)
    writer.add_int8("i8", -5)
    writer.add_uint64("u64", 1 << 60)
    writer.add_array("words", ["a", "ü", ""])
    writer.add_array("floats", [0.5, -1.5])
    data = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("t", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_reader.GgufFile(path)
    assert file.metadata["pi"] == 3.141592653589793
    assert (file.metadata["i8"], file.metadata["u64"]) == (-5, 1 << 60)
    assert file.metadata["words"] == ["a", "ü", ""]
    assert file.metadata["floats"] == [0.5, -1.5]
    assert file.tensors["t"].shape == (2, 32)


def test_digest_follows_the_data(tmp_path: Path) -> None:
    one = open_ref(g.write(tmp_path / "a.gguf", g.llama(), g.layer()))
    other = [*g.layer()[:-1], g.tensor("blk.0.ffn_down.weight", (32, 64), "q4_0", seed=99)]
    two = open_ref(g.write(tmp_path / "b.gguf", g.llama(), other))
    assert one.revision != two.revision


def test_reading_never_writes_the_file(tmp_path: Path) -> None:
    path = g.write(tmp_path / "m.gguf", g.llama(), g.layer())
    before = path.read_bytes()
    values(open_ref(path), "model.norm.weight").zero_()
    assert path.read_bytes() == before


def test_unknown_names_are_reported(tmp_path: Path) -> None:
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), g.layer()))
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        source.open_weights().read("nothing")
    tensors = [*g.layer(), g.tensor("blk.0.strange.weight", (32,))]
    source = open_ref(g.write(tmp_path / "m.gguf", g.llama(), tensors))
    assert "blk.0.strange.weight" in source.open_weights().index()
