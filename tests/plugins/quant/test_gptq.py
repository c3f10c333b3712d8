"""GPTQ layouts against element-wise readers, act-order, v1 and v2 zeros, refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant.gptq import Gptq
from tests.support import quant_numpy as q

BASE: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
    "checkpoint_format": "gptq", "damp_percent": 0.01,
}  # fmt: skip


def test_golden_words() -> None:
    """Rows 0..7 = codes 0..7 pack to 0x76543210."""
    codes = np.tile(np.arange(8), (8, 4))
    zero = np.full((8, 1), 8)
    tensors = q.gptq_tensors(codes, zero, np.ones((8, 1), np.float16), 4)
    assert set(tensors["qweight"].ravel()) == {0x76543210}
    assert set(tensors["qzeros"].ravel()) == {0x77777777}
    got = q.record(q.build(Gptq, BASE), q.to_torch(tensors, "a"), "a", 8, 32)
    assert torch.equal(got.decode(got), torch.from_numpy(codes).float() - 8)
    assert got.encoding == "int4:row"


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize(
    ("bits", "n", "k", "group"),
    [(4, 24, 96, 32), (4, 8, 64, -1), (8, 12, 64, 16), (2, 16, 64, 32), (3, 32, 96, 32),
     (4, 16, 80, 32), (3, 32, 64, -1)],
)  # fmt: skip
def test_layout(bits: int, n: int, k: int, group: int, v1: bool) -> None:
    size = k if group == -1 else group
    tensors = q.gptq_tensors(*q.random_groups(bits, n, k, bits, size), bits, v1)
    config = BASE | {
        "bits": bits, "group_size": group, "sym": False,
        "checkpoint_format": "gptq" if v1 else "gptq_v2",
    }  # fmt: skip
    got = q.record(q.build(Gptq, config), q.to_torch(tensors, "a.b"), "a.b", n, k)
    expected = torch.from_numpy(q.read_gptq(tensors, bits, size, v1))
    assert torch.equal(got.decode(got), expected)
    ids = torch.tensor([n - 1, 0, 3, 3])
    assert torch.equal(got.decode_rows(got, ids), expected[ids])
    assert all(part.shape[0] == n for part in got.parts.values())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_act_order(bits: int) -> None:
    n, k, group = 32, 128, 32
    tensors = q.gptq_tensors(*q.random_groups(3, n, k, bits, group), bits)
    order = np.random.default_rng(5).permutation(k)
    g_idx = np.empty(k, np.int32)
    g_idx[order] = np.arange(k) // group
    tensors["g_idx"] = g_idx
    quantizer = q.build(Gptq, BASE | {"bits": bits, "desc_act": True, "sym": False})
    got = q.record(quantizer, q.to_torch(tensors, "a"), "a", n, k)
    assert "+gidx" in got.encoding
    expected = torch.from_numpy(q.read_gptq(tensors, bits, group))
    assert torch.equal(got.decode(got), expected)
    assert torch.equal(got.decode_rows(got, torch.tensor([7, 1])), expected[[7, 1]])


def test_uneven_groups_of_act_order() -> None:
    """A shard's groups need not be equal in size."""
    n, k = 8, 32
    tensors = q.gptq_tensors(*q.random_groups(8, n, k, 4, 16), 4)
    tensors["g_idx"] = np.array([0] * 3 + [1] * 29, np.int32)
    config = BASE | {"group_size": 16, "desc_act": True}
    got = q.record(q.build(Gptq, config), q.to_torch(tensors, "a"), "a", n, k)
    assert torch.equal(got.decode(got), torch.from_numpy(q.read_gptq(tensors, 4, 16)))


def test_trivial_g_idx_disappears() -> None:
    tensors = q.gptq_tensors(*q.random_groups(8, 8, 64, 4, 32), 4)
    tensors["g_idx"] = (np.arange(64) // 32).astype(np.int32)
    quantizer = q.build(Gptq, BASE)
    assert "a.g_idx" in quantizer.slots(
        LinearDesc("a", "linear", 8, 64), q.index_of(q.to_torch(tensors, "a"))
    )
    got = q.record(quantizer, q.to_torch(tensors, "a"), "a", 8, 64)
    assert got.encoding == "int4:g32+zero"


def test_fused_components_concatenate() -> None:
    """Also where K = N, which a g_idx of [K] could be mistaken for a part with N rows."""
    quantizer, k = q.build(Gptq, BASE), 64
    for names, act_order in ((("q", "k"), False), (("q", "k"), True)):
        records = []
        for i, name in enumerate(names):
            tensors = q.gptq_tensors(*q.random_groups(i, 64, k, 4, 32), 4)
            if act_order:
                tensors["g_idx"] = np.random.default_rng(i).permutation(k).astype(np.int32) // 32
            records.append(q.record(quantizer, q.to_torch(tensors, name), name, 64, k))
        expected = torch.cat([r.decode(r) for r in records])
        joined = join_rows(records)
        assert len(joined) == (2 if act_order else 1)
        assert torch.equal(torch.cat([r.decode(r) for r in joined]), expected)


def test_rows_with_their_own_order() -> None:
    """Two layers of one row each concatenate; each row then has its own group index."""
    config = BASE | {"group_size": 8, "bits": 8, "desc_act": True}
    quantizer, records = q.build(Gptq, config), []
    for seed in (0, 1):
        codes, zero, scale = q.random_groups(seed, 4, 32, 8, 8)
        tensors = q.gptq_tensors(codes, zero, scale, 8)
        tensors["g_idx"] = np.random.default_rng(seed).permutation(32).astype(np.int32) // 8
        four = q.record(quantizer, q.to_torch(tensors, "a"), "a", 4, 32)
        parts = {p: t if p == "gidx" else t[:1] for p, t in four.parts.items()}
        records.append(type(four)(four.encoding, (1, 32), parts, four.decode, four.decode_rows))
    expected = torch.cat([r.decode(r) for r in records])
    (joined,) = join_rows(records)
    assert torch.equal(joined.decode(joined), expected)
    assert torch.equal(joined.decode_rows(joined, torch.tensor([1])), expected[1:])


def test_dynamic_rules() -> None:
    config = BASE | {
        "dynamic": {
            r"-:.*\.skip$": {},
            r"+:.*\.wide$": {"bits": 8, "group_size": 16},
            r".*\.wide$": {"bits": 2},
        }
    }
    quantizer = q.build(Gptq, config)
    tensors = q.gptq_tensors(*q.random_groups(1, 8, 64, 8, 16), 8)
    got = q.record(quantizer, q.to_torch(tensors, "model.wide"), "model.wide", 8, 64)
    assert torch.equal(got.decode(got), torch.from_numpy(q.read_gptq(tensors, 8, 16)))
    skipped = LinearDesc("model.skip", "linear", 8, 64)
    assert quantizer.slots(skipped, {}) == ("model.skip.weight",)
    stored = q.index_of(q.to_torch(tensors, "model.skip"))
    with pytest.raises(CheckpointError, match=r"model\.skip\.qweight.*dynamic rule"):
        quantizer.slots(skipped, stored)


def test_plain_layers_and_missing_tensors() -> None:
    quantizer = q.build(Gptq, BASE)
    plain = {"head.weight": torch.randn(4, 8, dtype=torch.float16)}
    got = q.record(quantizer, plain, "head", 4, 8)
    assert got.encoding == "none"
    assert torch.equal(got.decode(got), plain["head.weight"].float())
    desc = LinearDesc("x", "linear", 8, 64)
    assert quantizer.slots(desc, {}) == ("x.qweight", "x.qzeros", "x.scales")
    embedding = LinearDesc("e", "embedding", 8, 64)
    assert quantizer.slots(embedding, {}) == ("e.weight",)
    ordered = q.build(Gptq, BASE | {"desc_act": True})
    assert "x.g_idx" in ordered.slots(desc, {})
    tensors = q.to_torch(q.gptq_tensors(*q.random_groups(1, 8, 64, 4, 32), 4), "x")
    both = q.index_of(tensors | {"x.weight": torch.zeros(8, 64)})
    with pytest.raises(CheckpointError, match="stored twice"):
        quantizer.slots(desc, both)


def test_bias_of_zeros_is_left_out() -> None:
    tensors = q.to_torch(q.gptq_tensors(*q.random_groups(1, 8, 64, 4, 32), 4), "x")
    tensors["x.bias"] = torch.zeros(8)
    quantizer = q.build(Gptq, BASE)
    q.record(quantizer, tensors, "x", 8, 64)
    assert "x.bias" not in quantizer.slots(
        LinearDesc("x", "linear", 8, 64, bias=True), q.index_of(tensors)
    )
    tensors["x.bias"][3] = 0.5
    with pytest.raises(CheckpointError, match=r"x\.bias is not zero"):
        q.record(quantizer, tensors, "x", 8, 64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x.qweight": torch.zeros(7, 8, dtype=torch.int32)}, r"x\.qweight has shape"),
        ({"x.qweight": torch.zeros(8, 8, dtype=torch.int64)}, r"x\.qweight has dtype"),
        ({"x.qzeros": torch.zeros(1, 1, dtype=torch.int32)}, r"x\.qzeros has shape"),
        ({"x.scales": torch.zeros(3, 8)}, r"x\.scales has shape"),
        ({"x.scales": torch.full((2, 8), float("nan"))}, "NaN"),
        ({"x.g_idx": torch.full((64,), 2, dtype=torch.int32)}, r"groups 2\.\.2"),
        ({"x.g_idx": torch.zeros(9, dtype=torch.int32)}, r"g_idx has shape"),
    ],
)
def test_damaged_tensors(change: dict[str, torch.Tensor], match: str) -> None:
    tensors = q.to_torch(q.gptq_tensors(*q.random_groups(1, 8, 64, 4, 32), 4), "x") | change
    with pytest.raises(CheckpointError, match=match):
        q.record(q.build(Gptq, BASE), tensors, "x", 8, 64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": None}, "group_size is None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"desc_act": "yes"}, "desc_act is 'yes'"),
        ({"rotation": "hadamard"}, "'rotation' not supported"),
        ({"dynamic": {"+:a": {"rotation": 1}}}, r"dynamic\['\+:a'\]: 'rotation'"),
        ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
    ],
)
def test_config_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        q.build(Gptq, BASE | change)


def test_no_config() -> None:
    with pytest.raises(ModelError, match="quantization_config"):
        q.build(Gptq, None)


def test_weights_that_do_not_fill_words() -> None:
    tensors = q.to_torch(q.gptq_tensors(*q.random_groups(1, 8, 64, 4, 32), 4), "x")
    with pytest.raises(CheckpointError, match="whole 32-bit words"):
        q.record(q.build(Gptq, BASE), tensors, "x", 8, 60)
