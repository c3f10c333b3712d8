"""AWQ layouts against an element-wise reader; the interleave; refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant.awq import Awq
from tests.support import quant_numpy as q

BASE: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip


def test_golden_word() -> None:
    """Columns 0..7 = codes 0..7 -> 0x75316420."""
    codes = np.tile(np.arange(8)[:, None], (1, 32))
    tensors = q.awq_tensors(codes, np.zeros((8, 1), int), np.ones((8, 1), np.float16), 4)
    assert set(tensors["qweight"].ravel()) == {0x75316420}
    got = q.record(q.build(Awq, BASE), q.to_torch(tensors, "a"), "a", 8, 32)
    assert torch.equal(got.decode(got), torch.from_numpy(codes).float())


@pytest.mark.parametrize(
    ("bits", "n", "k", "group"), [(4, 24, 96, 32), (4, 8, 40, -1), (8, 12, 64, 16), (4, 16, 80, 32)]
)
def test_layout(bits: int, n: int, k: int, group: int) -> None:
    size = k if group == -1 else group
    tensors = q.awq_tensors(*q.random_groups(bits, n, k, bits, size), bits)
    config = {"quant_method": "awq", "w_bit": bits, "q_group_size": group, "version": "GEMM"}
    got = q.record(q.build(Awq, config), q.to_torch(tensors, "a.b"), "a.b", n, k)
    expected = torch.from_numpy(q.read_awq(tensors, bits, size))
    assert torch.equal(got.decode(got), expected)
    ids = torch.tensor([n - 1, 2])
    assert torch.equal(got.decode_rows(got, ids), expected[ids])
    assert all(part.shape[0] == n for part in got.parts.values())


def test_same_codes_as_gptq() -> None:
    """Both int4 layouts end in one canonical record, byte for byte."""
    from cardcage.plugins.quant.gptq import Gptq

    codes, zero, scale = q.random_groups(4, 16, 64, 4, 32)
    awq = q.to_torch(q.awq_tensors(codes, zero, scale, 4), "a")
    gptq = q.to_torch(q.gptq_tensors(codes, zero, scale, 4), "a")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    one = q.record(q.build(Awq, BASE), awq, "a", 16, 64)
    two = q.record(q.build(Gptq, config), gptq, "a", 16, 64)
    assert one.encoding == two.encoding == "int4:g32+zero"
    assert all(torch.equal(one.parts[p], two.parts[p]) for p in one.parts)


def test_without_zero_points() -> None:
    codes, _, scale = q.random_groups(4, 16, 64, 4, 32)
    tensors = q.awq_tensors(codes, np.full(scale.shape, 8), scale, 4)
    expected = torch.from_numpy(q.read_awq(tensors, 4, 32))
    del tensors["qzeros"]
    quantizer = q.build(Awq, BASE | {"zero_point": False})
    got = q.record(quantizer, q.to_torch(tensors, "a"), "a", 16, 64)
    assert got.encoding == "int4:g32"
    assert torch.equal(got.decode(got), expected)


def test_fused_components_concatenate() -> None:
    records = []
    for i, n in enumerate((16, 8)):
        tensors = q.awq_tensors(*q.random_groups(i, n, 64, 4, 32), 4)
        records.append(q.record(q.build(Awq, BASE), q.to_torch(tensors, "a"), "a", n, 64))
    expected = torch.cat([r.decode(r) for r in records])
    (joined,) = join_rows(records)
    assert torch.equal(joined.decode(joined), expected)


def test_presence_decides() -> None:
    quantizer = q.build(Awq, BASE | {"modules_to_not_convert": ["lm_head", "gate"]})
    desc = LinearDesc("m.gate_proj", "linear", 16, 64)
    assert quantizer.slots(desc, {}) == ("m.gate_proj.weight",)
    tensors = q.to_torch(q.awq_tensors(*q.random_groups(1, 16, 64, 4, 32), 4), "m.gate_proj")
    assert "m.gate_proj.qweight" in quantizer.slots(desc, q.index_of(tensors))
    missing = LinearDesc("m.up_proj", "linear", 16, 64)
    assert quantizer.slots(missing, {}) == tuple(
        f"m.up_proj.{s}" for s in ("qweight", "qzeros", "scales")
    )
    plain = {"m.up_proj.weight": torch.randn(16, 64)}
    assert q.record(quantizer, plain, "m.up_proj", 16, 64).encoding == "none"
    with pytest.raises(CheckpointError, match="stored twice"):
        quantizer.slots(desc, q.index_of(tensors | {"m.gate_proj.weight": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a.qweight": torch.zeros(64, 3, dtype=torch.int32)}, r"a\.qweight has shape"),
        ({"a.qzeros": torch.zeros(2, 2)}, r"a\.qzeros has dtype"),
        ({"a.scales": torch.full((2, 16), torch.inf)}, "infinity"),
    ],
)
def test_damaged_tensors(change: dict[str, torch.Tensor], match: str) -> None:
    tensors = q.to_torch(q.awq_tensors(*q.random_groups(1, 16, 64, 4, 32), 4), "a") | change
    with pytest.raises(CheckpointError, match=match):
        q.record(q.build(Awq, BASE), tensors, "a", 16, 64)


def test_odd_width() -> None:
    tensors = q.to_torch(q.awq_tensors(*q.random_groups(1, 16, 64, 4, 32), 4), "a")
    with pytest.raises(CheckpointError, match="not a multiple"):
        q.record(q.build(Awq, BASE), tensors, "a", 12, 64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"group_size": 0}, "group_size is 0"),
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"format": "exllama"}, "format is 'exllama'"),
        ({"zero_point": 1}, "zero_point is 1"),
        ({"rotate": True}, "'rotate' not supported"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
    ],
)
def test_config_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        q.build(Awq, BASE | change)
