"""Plain weights: cast to the compute dtype, not copied when they have it."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.contracts import LinearDesc, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.plugins.quant.none import Unquantized


def record(weight: torch.Tensor, dtype: torch.dtype) -> QuantTensor:
    quantizer = Unquantized().build(None, None, None)  # type: ignore[arg-type]
    desc = LinearDesc("w", "linear", *weight.shape)
    index = {"w.weight": TensorMeta(tuple(weight.shape), "x", 0)}
    assert quantizer.slots(desc, index) == ("w.weight",)
    return quantizer.record(desc, {"w.weight": weight}, index, dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast(stored: torch.dtype, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 8).to(stored)
    rec = record(weight, dtype)
    assert rec.encoding == "none"
    assert rec.shape == (5, 8)
    assert torch.equal(rec.parts["weight"], weight.to(dtype))
    assert torch.equal(rec.decode(rec), weight.to(dtype).float())
    ids = torch.tensor([4, 4, 1])
    assert torch.equal(rec.decode_rows(rec, ids), weight.to(dtype).float()[ids])


def test_no_copy_in_the_same_dtype() -> None:
    weight = torch.randn(5, 8)
    assert record(weight, torch.float32).parts["weight"].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_are_no_plain_weights(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match="declares no quantization"):
        record(torch.zeros(2, 2).to(dtype), torch.float32)
