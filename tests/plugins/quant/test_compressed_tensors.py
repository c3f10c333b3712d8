"""compressed-tensors: each format against element-wise readers, targets, ignore lists, refusals.

Where the package compressed-tensors is installed, its own packers are a second oracle.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant.compressed_tensors import CompressedTensors
from tests.support import quant_numpy as q

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def config(
    weights: dict[str, Any], format_: str, acts: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"], "weights": copy.deepcopy(weights), "input_activations": acts,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        "quantization_status": "compressed", "global_compression_ratio": 1.5,
    } | more  # fmt: skip


def build(*args: Any, drop: bool = False, **more: Any) -> Any:
    return q.build(CompressedTensors, config(*args, **more), drop_kv_scales=drop)


# ---- pack-quantized -----------------------------------------------------------------------------


def test_goldens() -> None:
    """int4 -8..7 -> 0x76543210, 0xfedcba98; int8 and zero points as the format defines."""
    tensors = q.ct_tensors(np.arange(16)[None], None, np.ones((1, 1), np.float16), 4)
    assert [hex(int(w) & 0xFFFFFFFF) for w in tensors["weight_packed"][0]] == [
        "0x76543210", "0xfedcba98",
    ]  # fmt: skip
    got = q.record(
        build(INT4 | {"group_size": 16}, "pack-quantized"), q.to_torch(tensors, "a"), "a", 1, 16
    )
    assert got.decode(got).tolist() == [[float(v) for v in range(-8, 8)]]
    eight = q.ct_tensors(np.array([[0, 127, 128, 255]]), None, np.ones((1, 1), np.float16), 8)
    assert hex(int(eight["weight_packed"][0, 0]) & 0xFFFFFFFF) == "0xff807f00"
    scheme = INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}
    got = q.record(build(scheme, "pack-quantized"), q.to_torch(eight, "a"), "a", 1, 4)
    assert got.decode(got).tolist() == [[-128.0, -1.0, 0.0, 127.0]]
    zero = np.array([[0], [15], [8]])
    three = q.ct_tensors(np.zeros((3, 32), int), zero, np.ones((3, 1), np.float16), 4)
    assert three["weight_zero_point"].tolist() == [[0x8F0]]
    scheme = INT4 | {"symmetric": False}
    got = q.record(build(scheme, "pack-quantized"), q.to_torch(three, "a"), "a", 3, 32)
    assert got.decode(got)[:, 0].tolist() == [0.0, -15.0, -8.0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "n", "k", "group"),
    [
        (4, 12, 96, 32),
        (4, 5, 52, -1),
        (8, 6, 64, 16),
        (8, 5, 30, -1),
        (4, 9, 80, 32),
        (3, 5, 70, 32),
        (2, 7, 40, 16),
    ],
)
def test_packed(bits: int, n: int, k: int, group: int, symmetric: bool) -> None:
    """Also with N and K that do not fill words, and a last group that is not full."""
    size = k if group == -1 else group
    codes, zero, scale = q.random_groups(bits, n, k, bits, size)
    tensors = q.ct_tensors(codes, None if symmetric else zero, scale, bits)
    scheme = INT4 | {"num_bits": bits, "symmetric": symmetric}
    scheme |= {"group_size": group} if group > 0 else {"strategy": "channel", "group_size": None}
    got = q.record(build(scheme, "pack-quantized"), q.to_torch(tensors, "a"), "a", n, k)
    expected = torch.from_numpy(q.read_ct(tensors, bits, size))
    assert torch.equal(got.decode(got), expected)
    assert torch.equal(got.decode_rows(got, torch.tensor([n - 1, 0])), expected[[n - 1, 0]])
    assert all(part.shape[0] == n for part in got.parts.values())


@pytest.mark.parametrize("order", ["group", "weight", "static"])
def test_act_order(order: str) -> None:
    codes, zero, scale = q.random_groups(2, 8, 64, 4, 16)
    tensors = q.ct_tensors(codes, zero, scale, 4)
    if order == "group":
        tensors["weight_g_idx"] = np.random.default_rng(1).permutation(64).astype(np.int32) // 16
    scheme = INT4 | {"group_size": 16, "symmetric": False, "actorder": order}
    quantizer = build(scheme, "pack-quantized")
    got = q.record(quantizer, q.to_torch(tensors, "a"), "a", 8, 64)
    assert ("+gidx" in got.encoding) == (order == "group")
    assert torch.equal(got.decode(got), torch.from_numpy(q.read_ct(tensors, 4, 16)))
    stray = q.to_torch(tensors, "a") | {"a.weight_g_idx": torch.zeros(64, dtype=torch.int32)}
    slots = quantizer.slots(LinearDesc("a", "linear", 8, 64), q.index_of(stray))
    assert ("a.weight_g_idx" in slots) == (order == "group")  # else the plan calls it unexpected


def test_packed_components_concatenate() -> None:
    records = []
    for i, n in enumerate((8, 4)):
        codes, zero, scale = q.random_groups(i, n, 64, 4, 32)
        tensors = q.ct_tensors(codes, zero, scale, 4)
        quantizer = build(INT4 | {"symmetric": False}, "pack-quantized")
        records.append(q.record(quantizer, q.to_torch(tensors, "a"), "a", n, 64))
    expected = torch.cat([r.decode(r) for r in records])
    (joined,) = join_rows(records)
    assert torch.equal(joined.decode(joined), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a.weight_shape": torch.tensor([64, 8])}, r"weight_shape is \[64, 8\]"),
        ({"a.weight_packed": torch.zeros(8, 7, dtype=torch.int32)}, r"weight_packed has shape"),
        ({"a.weight_scale": torch.ones(8, 3)}, r"a\.weight_scale has shape"),
        ({"a.weight_scale": torch.full((8, 2), torch.nan)}, "NaN"),
        ({"a.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}, "weight_zero_point has"),
    ],
)
def test_damaged_tensors(change: dict[str, torch.Tensor], match: str) -> None:
    codes, zero, scale = q.random_groups(0, 8, 64, 4, 32)
    tensors = q.to_torch(q.ct_tensors(codes, zero, scale, 4), "a") | change
    with pytest.raises(CheckpointError, match=match):
        q.record(build(INT4 | {"symmetric": False}, "pack-quantized"), tensors, "a", 8, 64)


# ---- 8-bit formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("scheme", "grid", "encoding"),
    [
        ({"strategy": "tensor"}, (1,), "fp8:row/token"),
        ({"strategy": "channel"}, (70, 1), "fp8:row/token"),
        ({"strategy": "block", "block_structure": [64, 64]}, (2, 2), "fp8:g64/group"),
        ({"strategy": "block", "block_structure": "64x64"}, (2, 2), "fp8:g64/group"),
        ({"strategy": "group", "group_size": 32}, (70, 3), "fp8:g32/token"),
    ],
)
def test_float(format_: str, scheme: dict[str, Any], grid: tuple[int, ...], encoding: str) -> None:
    n, k = 70, 96
    raw = np.random.default_rng(0).integers(0, 127, (n, k)).astype(np.uint8)
    scale = torch.rand(grid) + 0.1
    tensors = {
        "a.weight": torch.from_numpy(raw).view(torch.float8_e4m3fn), "a.weight_scale": scale
    }  # fmt: skip
    acts = TOKEN | {"type": "float"}
    if "group" in encoding:
        acts |= {"strategy": "group", "group_size": 64}
    got = q.record(build(FP8 | scheme, format_, acts), tensors, "a", n, k)
    assert got.encoding == encoding
    table = scale.reshape(-1, scale.shape[-1]).numpy()
    rows = {1: n, 2: 64}.get(len(table), 1)
    cols = {1: k, 2: 64, 3: 32}[table.shape[1]]
    expected = torch.from_numpy(q.scaled(q.E4M3[raw], table, rows, cols))
    assert torch.equal(got.decode(got), expected)


@pytest.mark.parametrize("format_", ["int-quantized", "naive-quantized"])
def test_int(format_: str) -> None:
    raw = np.random.default_rng(0).integers(-128, 128, (6, 20)).astype(np.int8)
    scale = torch.rand(6, 1) + 0.1
    tensors = {"a.weight": torch.from_numpy(raw), "a.weight_scale": scale}
    for acts, encoding in (
        (TOKEN | {"type": "int"}, "int8:row/token"),
        (TOKEN | {"type": "int", "strategy": "tensor"}, "int8:row/token"),
        (TOKEN | {"type": "int", "symmetric": False}, "int8:row/token_asym"),
        (None, "int8:row"),
    ):
        got = q.record(build(INT8, format_, acts), tensors, "a", 6, 20)
        assert got.encoding == encoding
        assert torch.equal(got.decode(got), torch.from_numpy(q.scaled(raw, scale.numpy(), 1, 20)))


def test_static_inputs() -> None:
    tensors = {
        "a.weight": torch.zeros(6, 20, dtype=torch.int8), "a.weight_scale": torch.ones(6, 1),
        "a.input_scale": torch.tensor([0.5]),
        "a.input_zero_point": torch.tensor([3], dtype=torch.int8),
    }  # fmt: skip
    acts = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    got = q.record(build(INT8, "int-quantized", acts), tensors, "a", 6, 20)
    assert got.encoding == "int8:row/static"
    got = q.record(build(INT8, "int-quantized", acts | {"symmetric": False}), tensors, "a", 6, 20)
    assert got.encoding == "int8:row/static_asym"
    assert got.parts["input_zero"].tolist() == [[3]] * 6


# ---- which layer gets which group ---------------------------------------------------------------


def two_groups() -> dict[str, Any]:
    base = config(INT4, "mixed-precision", ignore=["re:.*router$", "model.layers.9.mlp.up_proj"])
    base["config_groups"] = {
        "all": {"targets": ["Linear"], "format": "pack-quantized", "weights": INT4},
        "mlp": {
            "targets": ["re:.*mlp.*"], "format": "float-quantized",
            "weights": FP8 | {"strategy": "channel"},
            "input_activations": TOKEN | {"type": "float"},
        },
        "one": {"targets": ["model.layers.3.o_proj"], "format": "int-quantized", "weights": INT8},
    }  # fmt: skip
    return base


@pytest.mark.parametrize(
    ("name", "layer", "last"),
    [
        ("model.layers.0.self_attn.q_proj", "linear", "weight_packed"),
        ("model.layers.0.mlp.up_proj", "linear", "weight"),
        ("layers.0.mlp.up_proj", "linear", "weight"),
        ("model.layers.3.o_proj", "linear", "weight"),
        ("language_model.model.layers.3.o_proj", "linear", "weight"),
        ("model.layers.33.o_proj", "linear", "weight_packed"),
        ("model.layers.0.experts.1.down_proj", "moe", "weight_packed"),
        ("model.embed_tokens", "embedding", "plain"),
        ("model.layers.0.router", "linear", "plain"),
        ("model.layers.9.mlp.up_proj", "linear", "plain"),
    ],
)
def test_targets(name: str, layer: str, last: str) -> None:
    """Names and patterns come before class names, in the order of the groups."""
    quantizer = q.build(CompressedTensors, two_groups())
    slots = quantizer.slots(LinearDesc(name, layer, 64, 64), {})
    assert slots[0] == f"{name}.{'weight' if last == 'plain' else last}"
    assert (len(slots) == 1) == (last == "plain")


@pytest.mark.parametrize(
    ("stored", "name", "match"),
    [
        ({"weight": torch.zeros(8, 64)}, "a", r"a\.weight: .*float32.*'group_0' quantizes"),
        ({"weight_packed": torch.zeros(1)}, "lm_head", r"lm_head\.weight_packed: .*ignore"),
        ({"weight": torch.zeros(1, dtype=torch.int8)}, "lm_head", r"lm_head\.weight: .*int8"),
        ({"weight": torch.zeros(1), "weight_packed": torch.zeros(1)}, "a", "stored twice"),
    ],
)
def test_index_and_config_must_agree(
    stored: dict[str, torch.Tensor], name: str, match: str
) -> None:
    index = q.index_of({f"{name}.{k}": t for k, t in stored.items()})
    with pytest.raises(CheckpointError, match=match):
        build(INT4, "pack-quantized").slots(LinearDesc(name, "linear", 8, 64), index)


def test_packed_where_bytes_were_announced() -> None:
    index = q.index_of({"a.weight_packed": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="8-bit codes unpacked"):
        build(INT8, "int-quantized").slots(LinearDesc("a", "linear", 8, 64), index)


def test_kv_scheme() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    with pytest.raises(ModelError, match="kv_cache_scheme asks for a quantized KV cache"):
        build(FP8, "float-quantized", kv_cache_scheme=scheme)
    quantizer = build(FP8, "float-quantized", kv_cache_scheme=scheme, drop=True)
    index = q.index_of({"l.k_proj.k_scale": torch.ones(1), "l.v_scale": torch.ones(1)})
    slots = quantizer.slots(LinearDesc("l.k_proj", "linear", 8, 64), index)
    assert {"l.k_proj.k_scale", "l.v_scale"} <= set(slots)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "format_", "acts", "more", "match"),
    [
        (INT4, "nvfp4-pack-quantized", None, {}, "format is 'nvfp4-pack-quantized'"),
        (INT4, "pack-quantized", None, {"extra": 1}, "'extra' not supported"),
        (INT4, "pack-quantized", None, {"sparsity_config": {"format": "sparse-24-bitmask"}},
         "sparsity_config.format is 'sparse-24-bitmask'"),
        (INT4, "pack-quantized", None, {"transform_config": {"config_groups": {"u": {}}}},
         "transform_config asks for rotations"),
        (INT4, "pack-quantized", None, {"config_groups": {}}, "config_groups is missing"),
        (INT4, "pack-quantized", None, {"quantization_status": "calibration"},
         "quantization_status is 'calibration'"),
        (INT4 | {"num_bits": 5}, "pack-quantized", None, {}, "num_bits is 5"),
        (INT4 | {"strategy": "block"}, "pack-quantized", None, {}, "strategy is 'block'"),
        (INT4 | {"group_size": 0}, "pack-quantized", None, {}, "group_size is 0"),
        (INT4 | {"actorder": "dynamic"}, "pack-quantized", None, {}, "actorder is 'dynamic'"),
        (INT4 | {"codebook": 1}, "pack-quantized", None, {}, "weights: 'codebook'"),
        (INT4, "pack-quantized", TOKEN, {}, "input_activations with packed integer weights"),
        (FP8, "int-quantized", None, {}, "type is 'float'"),
        (INT4, "int-quantized", None, {}, "num_bits is 4"),
        (INT8 | {"symmetric": False}, "int-quantized", None, {}, "symmetric is False"),
        (FP8 | {"dynamic": True}, "float-quantized", None, {}, "weights.dynamic is True"),
        (FP8, "float-quantized", TOKEN, {}, "input_activations.type is 'int'"),
        (FP8, "float-quantized", TOKEN | {"type": "float", "num_bits": 4}, {}, "num_bits is 4"),
        (FP8, "float-quantized", TOKEN | {"type": "float", "dynamic": "local"}, {},
         "dynamic is 'local'"),
        (FP8, "float-quantized", TOKEN | {"type": "float", "strategy": "group"}, {},
         "the weights have no groups"),
        (FP8, "float-quantized", TOKEN | {"type": "float", "dynamic": False}, {},
         "strategy is 'token'"),
        (FP8 | {"strategy": "block", "block_structure": [64]}, "float-quantized", None, {},
         "block_structure"),
    ],
)  # fmt: skip
def test_config_is_refused_by_name(
    weights: dict[str, Any], format_: str, acts: dict[str, Any] | None, more: dict[str, Any],
    match: str,
) -> None:  # fmt: skip
    with pytest.raises(ModelError, match=match):
        build(weights, format_, acts, **more)


def test_groups_are_refused_by_name() -> None:
    for change, match in (
        ({"output_activations": TOKEN}, "output_activations"),
        ({"targets": []}, "targets must be"),
        ({"weights": None}, r"group_0\.weights is missing"),
        ({"secret": 1}, "'secret' not supported"),
    ):
        wrong = config(INT4, "pack-quantized")
        wrong["config_groups"]["group_0"] |= change
        with pytest.raises(ModelError, match=match):
            q.build(CompressedTensors, wrong)


# ---- the package itself -------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packers_of_the_package(bits: int) -> None:
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers",
        reason="the package compressed-tensors is not installed",
        exc_type=ImportError,
    )
    n, k = 10, 70
    codes, zero, scale = q.random_groups(bits, n, k, bits, 35)
    half = 1 << (bits - 1)
    ours = q.to_torch(q.ct_tensors(codes, zero, scale, bits), "a")
    packed = helpers.pack_to_int32(torch.from_numpy(codes - half).to(torch.int8), bits)
    assert torch.equal(packed, ours["a.weight_packed"])
    points = helpers.pack_to_int32(torch.from_numpy(zero - half).to(torch.int8), bits, packed_dim=0)
    assert torch.equal(points, ours["a.weight_zero_point"])
