"""FP8 layouts against an element-wise e4m3 reader; config and index; refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant._codecs import to_e4m3
from cardcage.plugins.quant.fp8 import Fp8
from tests.support import quant_numpy as q

DYNAMIC: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = DYNAMIC | {"weight_block_size": [128, 128]}


def codes(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Random e4m3 codes without NaN, the first 254 of them every finite one; their values."""
    raw = np.random.default_rng(seed).integers(0, 256, (n, k)).astype(np.uint8)
    finite = np.array([b for b in range(256) if b & 127 != 127], np.uint8)
    flat = raw.reshape(-1)
    flat[: min(254, flat.size)] = finite[: flat.size]
    raw[(raw & 127) == 127] = 0
    return torch.from_numpy(raw).view(torch.float8_e4m3fn), q.E4M3[raw]


def test_every_code_word() -> None:
    """All 254 finite bytes decode to their value and encode back to themselves."""
    raw = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    values = torch.from_numpy(q.E4M3[raw.numpy()]).float()
    assert torch.equal(raw.view(torch.float8_e4m3fn).float(), values)
    assert torch.equal(to_e4m3(values).view(torch.uint8), raw)


def test_encoder_goldens() -> None:
    x = torch.tensor([464.0, 1.0625, 1.1875, 0.0009765625, 0.001, -1e9, 0.0, -0.0])
    got = to_e4m3(x).view(torch.uint8).tolist()
    assert got == [0x7E, 0x38, 0x3A, 0x00, 0x01, 0xFE, 0x00, 0x80]
    random = np.random.default_rng(1).normal(0, 60, 500)
    want = [q.nearest_e4m3(float(np.float32(v))) for v in random]
    assert to_e4m3(torch.from_numpy(random).float()).view(torch.uint8).tolist() == want


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), "n", "n1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_tensor_and_per_channel(shape: Any, dtype: torch.dtype) -> None:
    n, k = 12, 40
    shape = {"n": (n,), "n1": (n, 1)}.get(shape, shape)
    weight, values = codes(n, k)
    scale = (torch.rand(shape) + 0.01).to(dtype)
    tensors = {"a.weight": weight, "a.weight_scale": scale}
    got = q.record(q.build(Fp8, DYNAMIC), tensors, "a", n, k)
    rows = scale.numel() == n
    grid = scale.float().reshape(-1, 1).numpy()
    expected = torch.from_numpy(q.scaled(values, grid, 1 if rows else n, k))
    assert got.encoding == "fp8:row/token"
    assert torch.equal(got.decode(got), expected)
    assert torch.equal(got.decode_rows(got, torch.tensor([5, 0])), expected[[5, 0]])


@pytest.mark.parametrize(("n", "k"), [(256, 128), (200, 300), (128, 129), (5, 260)])
@pytest.mark.parametrize("scales", ["float32", "ue8m0", "ue8m0 bytes"])
def test_block_128(n: int, k: int, scales: str) -> None:
    weight, values = codes(n, k)
    grid = torch.rand(-(-n // 128), -(-k // 128)) + 0.1
    config: dict[str, Any] = BLOCK
    if scales != "float32":
        config = BLOCK | {"scale_fmt": "ue8m0"}
        raw = torch.randint(100, 140, grid.shape, dtype=torch.uint8)
        grid = 2.0 ** (raw.float() - 127)
        stored = raw if scales.endswith("bytes") else raw.view(torch.float8_e8m0fnu)
    else:
        stored = grid
    tensors = {"a.weight": weight, "a.weight_scale_inv": stored}
    got = q.record(q.build(Fp8, config), tensors, "a", n, k)
    act = "group_ue8m0" if scales != "float32" else "group" if k > 128 else "token"
    assert got.encoding == ("fp8:row/token" if act == "token" else f"fp8:g128/{act}")
    expected = torch.from_numpy(q.scaled(values, grid.numpy(), 128, 128))
    assert torch.equal(got.decode(got), expected)
    assert torch.equal(got.decode_rows(got, torch.tensor([n - 1])), expected[[n - 1]])


def test_components_concatenate_exactly() -> None:
    """Scalars of their own, and blocks whose component ends inside a block."""
    scalars, blocks, wanted = [], [], []
    for i, n in enumerate((96, 40)):
        weight, values = codes(n, 256, i)
        scalar = torch.tensor(0.5 + i)
        grid = torch.rand(1, 2) + 0.1
        scalars.append(q.record(
            q.build(Fp8, DYNAMIC), {"a.weight": weight, "a.weight_scale": scalar}, "a", n, 256
        ))  # fmt: skip
        blocks.append(q.record(
            q.build(Fp8, BLOCK), {"a.weight": weight, "a.weight_scale_inv": grid}, "a", n, 256
        ))  # fmt: skip
        wanted.append((
            q.scaled(values, scalar.view(1, 1).numpy(), n, 256),
            q.scaled(values, grid.numpy(), 128, 128),
        ))  # fmt: skip
    for records, which in ((scalars, 0), (blocks, 1)):
        (joined,) = join_rows(records)
        expected = torch.from_numpy(np.concatenate([w[which] for w in wanted]))
        assert torch.equal(joined.decode(joined), expected)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_activations(name: str) -> None:
    quantizer = q.build(Fp8, DYNAMIC | {"activation_scheme": "static"})
    weight, _ = codes(8, 16)
    tensors = {
        "a.weight": weight, "a.weight_scale": torch.tensor([0.5]), f"a.{name}": torch.tensor(0.25)
    }  # fmt: skip
    got = q.record(quantizer, tensors, "a", 8, 16)
    assert got.encoding == "fp8:row/static"
    assert torch.equal(got.parts["input_scale"], torch.full((8, 1), 0.25))
    desc = LinearDesc("a", "linear", 8, 16)
    del tensors[f"a.{name}"]
    assert "a.input_scale" in quantizer.slots(desc, q.index_of(tensors))
    with pytest.raises(CheckpointError, match="above zero"):
        q.record(quantizer, tensors | {f"a.{name}": torch.zeros(1)}, "a", 8, 16)


def test_fbgemm() -> None:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 300.0}
    weight, values = codes(8, 16)
    scale = torch.rand(8, 1) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale": scale}
    got = q.record(q.build(Fp8, config), tensors, "a", 8, 16)
    assert got.encoding == "fp8:row/token_bound"
    assert float(got.parts["input_bound"].max()) == 300.0
    assert torch.equal(got.decode(got), torch.from_numpy(q.scaled(values, scale.numpy(), 1, 16)))


def test_names_that_are_left_out() -> None:
    quantizer = q.build(Fp8, DYNAMIC | {"modules_to_not_convert": ["lm_head", "layers.0.b_proj"]})
    weight, _ = codes(4, 8)
    plain = {"model.layers.0.b_proj.weight": torch.randn(4, 8)}
    assert q.record(quantizer, plain, "model.layers.0.b_proj", 4, 8).encoding == "none"
    stored = {
        "model.layers.0.b_proj.weight": weight,
        "model.layers.0.b_proj.weight_scale": torch.tensor(1.0),
    }
    with pytest.raises(CheckpointError, match=r"layers\.0\.b_proj\.weight.*not quantized"):
        q.record(quantizer, stored, "model.layers.0.b_proj", 4, 8)
    # a dot boundary is needed: q_b_proj is another layer
    other = {n.replace("b_proj", "q_b_proj"): t for n, t in stored.items()}
    got = q.record(quantizer, other, "model.layers.0.q_b_proj", 4, 8)
    assert got.encoding == "fp8:row/token"


def test_a_fused_name_counts_for_its_components() -> None:
    quantizer = q.build(Fp8, DYNAMIC | {"ignored_layers": ["model.layers.1.self_attn.qkv_proj"]})
    weight, _ = codes(4, 8)
    for name, fails in (("layers.1.self_attn.k_proj", True), ("layers.1.self_attn.o_proj", False)):
        stored = {f"model.{name}.weight": weight, f"model.{name}.weight_scale": torch.tensor(1.0)}
        if fails:
            with pytest.raises(CheckpointError, match="one of them is wrong"):
                q.record(quantizer, stored, f"model.{name}", 4, 8)
        else:
            q.record(quantizer, stored, f"model.{name}", 4, 8)


def test_index_decides_and_must_be_whole() -> None:
    quantizer = q.build(Fp8, BLOCK)
    desc = LinearDesc("a", "linear", 8, 16)
    weight, _ = codes(8, 16)
    # a scale that is not there is asked for by name
    assert quantizer.slots(desc, q.index_of({"a.weight": weight})) == ("a.weight", "a.weight_scale")
    assert quantizer.slots(desc, {}) == ("a.weight", "a.weight_scale")
    assert quantizer.slots(LinearDesc("e", "embedding", 8, 16), {}) == ("e.weight",)
    mixed = {"a.weight": torch.randn(8, 16), "a.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"a\.weight: .* stores plain float32 with scales"):
        quantizer.slots(desc, q.index_of(mixed))
    twice = {"a.weight": weight, "a.weight_scale": torch.ones(1), "a.weight_scale_inv": weight}
    with pytest.raises(CheckpointError, match="both claim"):
        quantizer.slots(desc, q.index_of(twice))


def test_kv_scales_are_dropped_on_demand() -> None:
    desc = LinearDesc("l.self_attn.k_proj", "linear", 8, 16)
    weight, _ = codes(8, 16)
    tensors = {
        "l.self_attn.k_proj.weight": weight,
        "l.self_attn.k_proj.weight_scale": torch.ones(1),
        "l.self_attn.k_proj.k_scale": torch.ones(1),
        "l.self_attn.v_scale": torch.ones(1),
    }
    kept = q.build(Fp8, DYNAMIC).slots(desc, q.index_of(tensors))
    dropped = q.build(Fp8, DYNAMIC, drop_kv_scales=True).slots(desc, q.index_of(tensors))
    assert not any(n.endswith(("k_scale", "v_scale")) for n in kept)
    assert set(dropped) == set(tensors)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a.weight_scale": torch.ones(3)}, r"a\.weight_scale has shape \[3\]"),
        ({"a.weight_scale": torch.tensor(float("nan"))}, "NaN or infinity"),
        ({"a.weight_scale": torch.ones(1, dtype=torch.int32)}, "dtype torch.int32"),
        ({"a.weight": torch.full((8, 16), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)},
         r"a\.weight holds NaN"),
        ({"a.weight": torch.zeros(8, 16, dtype=torch.float8_e5m2)}, "float8_e5m2"),
        ({"a.weight": torch.zeros(8, 15).to(torch.float8_e4m3fn)}, r"a\.weight has shape"),
    ],
)  # fmt: skip
def test_damaged_tensors(change: dict[str, torch.Tensor], match: str) -> None:
    weight, _ = codes(8, 16)
    tensors = {"a.weight": weight, "a.weight_scale": torch.ones(1)} | change
    with pytest.raises(CheckpointError, match=match):
        q.record(q.build(Fp8, DYNAMIC), tensors, "a", 8, 16)


def test_block_scale_of_the_wrong_grid() -> None:
    weight, _ = codes(200, 16)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"weight_scale_inv has shape \[1, 1\].*\[2, 1\]"):
        q.record(q.build(Fp8, BLOCK), tensors, "a", 200, 16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation_scheme": "magic"}, "activation_scheme is 'magic'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "'static' with"),
        ({"scale_fmt": "ue8m0"}, "without weight_block_size"),
        ({"scale_fmt": "int"}, "scale_fmt is 'int'"),
        ({"expert_dtype": "fp4"}, "'expert_dtype' not supported"),
        ({"ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        ({"quant_method": "fbgemm_fp8", "activation_scheme": "static"}, "'activation_scheme'"),
    ],
)
def test_config_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        q.build(Fp8, DYNAMIC | change)
