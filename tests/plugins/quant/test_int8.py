"""INT8 layouts against an element-wise reader; static, asymmetric and block variants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc
from cardcage.core.errors import CheckpointError, ModelError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant.int8 import Int8
from tests.support import quant_numpy as q

BASE: dict[str, Any] = {"quant_method": "int8", "activation_scheme": "dynamic"}


def codes(n: int, k: int, seed: int = 0) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(-128, 128, (n, k)).astype(np.int8)
    raw.reshape(-1)[:256] = np.arange(-128, 128)[: raw.size]
    return torch.from_numpy(raw)


@pytest.mark.parametrize("shape", [(), (1,), (12,), (12, 1)])
def test_scales_per_tensor_and_row(shape: tuple[int, ...]) -> None:
    weight, scale = codes(12, 40), torch.rand(shape) + 0.01
    tensors = {"a.weight": weight, "a.weight_scale": scale}
    got = q.record(q.build(Int8, BASE), tensors, "a", 12, 40)
    grid = scale.reshape(-1, 1).numpy()
    expected = torch.from_numpy(q.scaled(weight.numpy(), grid, 12 // len(grid), 40))
    assert got.encoding == "int8:row/token"
    assert torch.equal(got.decode(got), expected)
    assert torch.equal(got.decode_rows(got, torch.tensor([3])), expected[[3]])


@pytest.mark.parametrize(("n", "k"), [(96, 64), (40, 70)])
def test_blocks(n: int, k: int) -> None:
    config = {"quant_method": "blockwise_int8", "weight_block_size": [32, 32]}
    weight, grid = codes(n, k), torch.rand(-(-n // 32), -(-k // 32)) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale_inv": grid}
    got = q.record(q.build(Int8, config), tensors, "a", n, k)
    assert got.encoding == "int8:g32/group"
    expected = torch.from_numpy(q.scaled(weight.numpy(), grid.numpy(), 32, 32))
    assert torch.equal(got.decode(got), expected)


def test_static_and_asymmetric_inputs() -> None:
    quantizer = q.build(Int8, BASE | {"activation_scheme": "static"})
    tensors = {
        "a.weight": codes(4, 8), "a.weight_scale": torch.ones(4, 1),
        "a.input_scale": torch.tensor([0.5]),
    }  # fmt: skip
    assert q.record(quantizer, tensors, "a", 4, 8).encoding == "int8:row/static"
    for dtype in (torch.int8, torch.int32):
        zero = {"a.input_zero_point": torch.tensor([-7], dtype=dtype)}
        got = q.record(quantizer, tensors | zero, "a", 4, 8)
        assert got.encoding == "int8:row/static_asym"
        assert got.parts["input_zero"].tolist() == [[-7]] * 4
    with pytest.raises(CheckpointError, match="input_zero_point has dtype"):
        q.record(quantizer, tensors | {"a.input_zero_point": torch.zeros(1)}, "a", 4, 8)


def test_weights_only() -> None:
    quantizer = q.build(Int8, BASE | {"activation_scheme": None})
    tensors = {"a.weight": codes(4, 8), "a.weight_scale": torch.ones(4, 1)}
    assert q.record(quantizer, tensors, "a", 4, 8).encoding == "int8:row"


def test_components_concatenate_exactly() -> None:
    records, wanted = [], []
    for i, n in enumerate((6, 3)):
        weight, scale = codes(n, 16, i), torch.tensor([0.5 + i])
        tensors = {"a.weight": weight, "a.weight_scale": scale}
        records.append(q.record(q.build(Int8, BASE), tensors, "a", n, 16))
        wanted.append(q.scaled(weight.numpy(), scale.view(1, 1).numpy(), n, 16))
    (joined,) = join_rows(records)
    assert torch.equal(joined.decode(joined), torch.from_numpy(np.concatenate(wanted)))


def test_plain_and_missing() -> None:
    quantizer = q.build(Int8, BASE | {"modules_to_not_convert": ["lm_head"]})
    assert q.record(quantizer, {"lm_head.weight": torch.ones(2, 3)}, "lm_head", 2, 3).encoding == (
        "none"
    )
    desc = LinearDesc("a", "linear", 4, 8)
    index = q.index_of({"a.weight": codes(4, 8)})
    assert quantizer.slots(desc, index) == ("a.weight", "a.weight_scale")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*not quantized"):
        quantizer.slots(
            LinearDesc("lm_head", "linear", 4, 8), q.index_of({"lm_head.weight": codes(4, 8)})
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation_scheme": "magic"}, "activation_scheme is 'magic'"),
        ({"quant_method": "blockwise_int8"}, "weight_block_size is missing"),
        ({"weight_block_size": [32]}, "weight_block_size"),
        ({"weight_block_size": [32, 32], "activation_scheme": "static"}, "'static' with"),
        ({"bits": 4}, "'bits' not supported"),
    ],
)
def test_config_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        q.build(Int8, BASE | change)
