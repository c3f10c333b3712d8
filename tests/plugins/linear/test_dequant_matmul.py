"""Decode, then multiply: equal to a dense layer for every encoding and mode."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from cardcage.core.contracts import LinearNeed, QuantTensor
from cardcage.plugins.linear.dequant_matmul import DequantMatmul, DequantMatmulOptions
from cardcage.plugins.linear.dequant_matmul import kernel as implementation

HOST = torch.device("cpu")


def record(n: int = 7, k: int = 24) -> QuantTensor:
    """A made-up encoding: int8 codes with one scale per row."""
    codes = torch.randint(-50, 50, (n, k), dtype=torch.int8)
    scale = torch.rand(n, 1) * 0.1

    def decode(r: QuantTensor) -> torch.Tensor:
        return r.parts["codes"].float() * r.parts["scale"]

    def rows(r: QuantTensor, ids: torch.Tensor) -> torch.Tensor:
        return r.parts["codes"][ids].float() * r.parts["scale"][ids]

    return QuantTensor("test:int8", (n, k), {"codes": codes, "scale": scale}, decode, rows)


@pytest.mark.parametrize("mode", ["cached", "streaming"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_equals_a_dense_layer(mode: str, dtype: str, with_bias: bool, tokens: int) -> None:
    rec = record()
    options = DequantMatmulOptions(mode=mode)
    kernel = DequantMatmul().build(LinearNeed(dtype=dtype), None, options)  # type: ignore[arg-type]
    handle = kernel.prepare(rec, HOST)
    kind = getattr(torch, dtype)
    x = torch.randn(tokens, 24).to(kind)
    bias = torch.randn(7).to(kind) if with_bias else None
    want = torch.nn.functional.linear(x, rec.decode(rec).to(kind), bias)
    got = kernel.run(handle, x, bias)
    assert got.dtype == kind
    assert torch.equal(got, want)


def test_decoding_in_pieces_equals_decoding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rec = record(13, 24)
    monkeypatch.setattr(implementation, "_CHUNK_ELEMS", {"cpu": 3 * 24})
    got = implementation.decode_to(rec, HOST, torch.bfloat16)
    assert torch.equal(got, rec.decode(rec).bfloat16())


def test_plain_records_run_too() -> None:
    weight = torch.randn(5, 8)
    rec = QuantTensor("none", (5, 8), {"weight": weight}, lambda r: weight, lambda r, i: weight[i])
    kernel = DequantMatmul().build(LinearNeed(), None, None)  # type: ignore[arg-type]
    handle = kernel.prepare(rec, HOST)
    assert handle.data_ptr() == weight.data_ptr()


def test_options_are_checked() -> None:
    with pytest.raises(ValidationError):
        DequantMatmulOptions(mode="lazy")
    with pytest.raises(ValidationError):
        DequantMatmulOptions(tile=3)
