"""4-bit products against the exact values: packed and dense paths, every encoding."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cardcage.core.contracts import DeviceFacts, LinearDesc, LinearNeed, QuantTensor, TensorMeta
from cardcage.plugins.linear.cpu_int4 import CpuInt4, CpuInt4Options
from cardcage.plugins.linear.cpu_int4 import kernel as implementation
from cardcage.plugins.linear.cpu_int4.kernel import rows_limit
from cardcage.plugins.quant.gguf import GgufQuant
from tests.support import gguf_files as g

HOST = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="an x86 kernel"
)


def record(encoding: str, n: int, k: int) -> QuantTensor:
    kind = encoding.removeprefix("gguf:")
    raw = torch.frombuffer(bytearray(g.packed((n, k), kind, 5)), dtype=torch.uint8).view(n, -1)
    quantizer = GgufQuant().build(None, None, None)  # type: ignore[arg-type]
    index = {"w.weight": TensorMeta((n, k), "packed", raw.numel(), encoding)}
    return quantizer.record(
        LinearDesc("w", "linear", n, k), {"w.weight": raw}, index, torch.bfloat16
    )


def build(features: frozenset[str] = frozenset(), **options: Any) -> Any:
    facts = DeviceFacts("test", "cpu", (), 1 << 34, 1 << 34, 1, features)
    ctx = SimpleNamespace(hardware=SimpleNamespace(facts=lambda: facts))
    need = LinearNeed(dtype="bfloat16")
    return CpuInt4().build(need, ctx, CpuInt4Options(**options))  # type: ignore[arg-type]


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    want = x.double() @ weight.double().T
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("encoding", ["gguf:q4_0", "gguf:q4_1", "gguf:q4_k", "gguf:q8_0"])
@pytest.mark.parametrize(("n", "k"), [(16, 256), (80, 512), (144, 256)])
@pytest.mark.parametrize("features", [frozenset(), frozenset({"avx512_bf16"})])
def test_both_paths_are_close_to_the_exact_product(
    encoding: str, n: int, k: int, features: frozenset[str]
) -> None:
    rec = record(encoding, n, k)
    weight = rec.decode(rec)
    kernel = build(features)
    handle = kernel.prepare(rec, HOST)
    assert handle.dense is not None
    assert handle.dense.dtype == (torch.bfloat16 if features else torch.float32)
    for tokens in (1, 2, 3, handle.rows, handle.rows + 1, 67):
        x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        got = kernel.run(handle, x)
        assert got.shape == (tokens, n)
        assert got.dtype == torch.bfloat16
        assert error(got, x, weight) < 2**-7


def test_q8_0_scales_stay_consistent_between_its_two_halves() -> None:
    rec = record("gguf:q8_0", 32, 64)
    kernel = build(dense="never")
    handle = kernel.prepare(rec, HOST)
    unit = torch.eye(64).bfloat16()
    got = kernel.run(handle, unit).double().T
    assert handle.doubled
    # one column at a time: each value carries the scale's rounding and the result's own
    torch.testing.assert_close(got, rec.decode(rec).double(), rtol=2**-7, atol=1e-9)


def test_a_row_does_not_depend_on_the_others() -> None:
    rec = record("gguf:q4_1", 64, 128)
    kernel = build(packed_rows=64)
    handle = kernel.prepare(rec, HOST)
    x = torch.randn(13, 128).bfloat16()
    whole = kernel.run(handle, x)
    for i in range(13):
        assert torch.equal(kernel.run(handle, x[i : i + 1])[0], whole[i])


def test_bias_strides_and_no_rows() -> None:
    rec = record("gguf:q4_0", 32, 64)
    kernel = build()
    handle = kernel.prepare(rec, HOST)
    bias = torch.randn(32).bfloat16()
    for tokens in (3, 40):
        x = torch.randn(tokens, 128).bfloat16()[:, ::2]
        plain = kernel.run(handle, x)
        torch.testing.assert_close(kernel.run(handle, x, bias), plain + bias, rtol=1e-2, atol=1e-2)
    assert kernel.run(handle, torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 32)


def test_the_dense_copy_follows_the_option_and_memory() -> None:
    rec = record("gguf:q4_0", 32, 64)
    assert build(dense="always").prepare(rec, HOST).dense is not None
    assert build(dense="never").prepare(rec, HOST).dense is None
    kernel = build()
    kernel.memory_bytes = 32 * 64 * 4 * 256 - 1
    assert kernel.prepare(rec, HOST).dense is None
    x = torch.randn(100, 64).bfloat16()
    got = kernel.run(kernel.prepare(rec, HOST), x)  # many rows run packed then
    assert error(got, x, rec.decode(rec)) < 2**-7


def test_packing_in_pieces_equals_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (208, 64), dtype=torch.uint8)
    whole = implementation._pack(codes)
    monkeypatch.setattr(implementation, "_PIECE_ELEMS", 64 * 64)
    assert torch.equal(implementation._pack(codes), whole)


def test_rows_by_instruction_set() -> None:
    assert rows_limit(frozenset({"amx_bf16", "avx512_bf16"})) < rows_limit(
        frozenset({"avx512_bf16"})
    )
    assert rows_limit(frozenset({"avx512_bf16"})) < rows_limit(frozenset({"avx2"}))


def test_caps_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = CpuInt4.caps
    assert "gguf:q4_1" in caps.encoding
    assert caps.dtype == frozenset({"bfloat16"})  # float32 stays exact: decoded weights
    assert caps.out_features.reason("out_features", 24)
    assert CpuInt4().reasons_against(LinearNeed()) == []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in CpuInt4().reasons_against(LinearNeed())[0]
