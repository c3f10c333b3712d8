"""INT8 products against exact integer sums in numpy, for every way to quantize the input."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearNeed, PluginContext, QuantTensor
from cardcage.plugins.linear._activations import merge_static, parse
from cardcage.plugins.linear.int8_matmul import Int8Matmul
from cardcage.plugins.linear.int8_matmul.kernel import (
    Int8Kernel,
    float_product,
    integer_product,
    integer_product_works,
)

F32 = np.float32
CASES = [
    "int8:row/token", "int8:row/token_asym", "int8:row/static", "int8:row/static_asym",
    "int8:g32/group", "int8:g32/token",
]  # fmt: skip
VARIANTS = [(True, False), (False, False), (True, True)]  # (integer product, padded)


def layer(encoding: str, n: int, k: int) -> QuantTensor:
    rng = np.random.default_rng(0)
    groups = -(-k // 32) if ":g32" in encoding else 1
    parts = {
        "weight": torch.from_numpy(rng.integers(-128, 128, (n, k)).astype(np.int8)),
        "scale": torch.from_numpy(rng.uniform(0.001, 0.01, (n, groups)).astype(F32)),
    }
    if "/static" in encoding:
        parts["input_scale"] = torch.full((n, 1), 0.03)
    if encoding.endswith("static_asym"):
        parts["input_zero"] = torch.full((n, 1), -21, dtype=torch.int32)
    unused: Any = None
    return QuantTensor(encoding, (n, k), parts, unused, unused)


def reference(record: QuantTensor, x: np.ndarray) -> np.ndarray:
    """Codes one by one, integer sums, scales in float64."""
    act = record.encoding.split("/")[1]
    w = record.parts["weight"].numpy().astype(np.int64)
    ws = record.parts["scale"].numpy().astype(np.float64)
    (n, k), t = record.shape, x.shape[0]
    width = 32 if ws.shape[1] > 1 else k
    out = np.zeros((t, n))
    for row in range(t):
        codes, scales, zero = np.zeros(k, np.int64), np.zeros(k), 0
        step = width if act == "group" else k
        for at in range(0, k, step):
            part = x[row, at : at + step]
            if act == "static" or act == "static_asym":
                s, zero = F32(0.03), -21 if act == "static_asym" else 0
            elif act == "token_asym":
                low, high = min(part.min(), F32(0)), max(part.max(), F32(0))
                s = max(F32((high - low) / F32(255)), F32(1e-12))
                zero = int(np.round(F32(-128) - F32(low / s)))
            else:
                s = F32(max(F32(np.abs(part).max()), F32(1e-12)) / F32(127))
            codes[at : at + step] = np.clip(np.round(part / s) + zero, -128, 127)
            scales[at : at + step] = s
        for at in range(0, k, width):
            piece = slice(at, at + width)
            sums = w[:, piece] @ (codes[piece] - zero)
            out[row] += sums * scales[at] * ws[:, at // width]
    return out


@pytest.mark.parametrize(("native", "pad"), VARIANTS)
@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize(
    ("t", "n", "k"), [(1, 8, 64), (5, 7, 70), (20, 16, 96), (3, 5, 1), (256, 9, 70)]
)
def test_against_integers(encoding: str, t: int, n: int, k: int, native: bool, pad: bool) -> None:
    """Integers are exact: only the scaling rounds, once per group."""
    record = layer(encoding, n, k)
    kernel = Int8Kernel(parse(encoding), native, pad)
    handle = kernel.prepare(record, torch.device("cpu"))
    x = torch.randn(t, k, generator=torch.Generator().manual_seed(t))
    x[0, min(3, k - 1)] = 9.0
    if t > 1:
        x[1] = 0
    want = reference(record, x.numpy())
    bias = torch.randn(n)
    for b in (None, bias):
        got = kernel.run(handle, x, b)
        exact = want + (0 if b is None else b.numpy())
        assert got.shape == (t, n)
        assert np.allclose(got.numpy(), exact, rtol=2e-6, atol=2e-5)
    half = kernel.run(handle, x.bfloat16())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("k", [1, 7, 1024, 1025, 3000])
def test_extreme_sums_are_exact(k: int) -> None:
    a = torch.full((3, k), -128, dtype=torch.int8)
    b = torch.full((5, k), -128, dtype=torch.int8)
    b[1] = 127
    want = a.long() @ b.long().t()
    assert torch.equal(float_product(a, b).long(), want)
    if k > 1:  # the kernel pads a single column
        assert torch.equal(integer_product(a, b).long(), want)


def test_merged_static_ranges() -> None:
    """The merged range holds each component's; equal components stay as they are."""
    scale = torch.tensor([[0.1], [0.1], [0.3]])
    assert merge_static(scale, None)[0].item() == pytest.approx(0.3)
    zero = torch.tensor([[-100], [-100], [50]], dtype=torch.int32)
    s, z = merge_static(scale, zero)
    low = min(0.1 * (-128 + 100), 0.3 * (-128 - 50))
    high = max(0.1 * (127 + 100), 0.3 * (127 - 50))
    assert s.item() == pytest.approx((high - low) / 255)
    assert z is not None
    assert z.item() == np.round(-128 - low / ((high - low) / 255))
    same, offset = merge_static(torch.full((3, 1), 0.07), torch.full((3, 1), 13))
    assert same.item() == F32(0.07)
    assert offset is not None
    assert offset.item() == 13


@pytest.mark.parametrize("encoding", CASES)
def test_rows_do_not_see_their_neighbours(encoding: str) -> None:
    record = layer(encoding, 16, 64)
    kernel = Int8Kernel(parse(encoding), True, False)
    handle = kernel.prepare(record, torch.device("cpu"))
    x = torch.randn(9, 64)
    x[4] *= 1000
    alone = torch.cat([kernel.run(handle, row[None]) for row in x])
    assert torch.equal(kernel.run(handle, x), alone)


def build(device: str, n: int, k: int, encoding: str) -> Any:
    need = LinearNeed(encoding=encoding, device_type=device, in_features=k, out_features=n)
    ctx = PluginContext(logging.getLogger("test"), {}, time.monotonic, Path())
    return Int8Matmul().build(need, ctx, None)


def test_the_host_has_an_integer_product() -> None:
    assert integer_product_works("cpu")
    assert build("cpu", 8, 8, "int8:row/token").layout_id == "int8_matmul.int.1"


def test_what_it_takes() -> None:
    from cardcage.core.resolver import compare

    need = LinearNeed(encoding="int8:row/token", in_features=64)
    assert not compare(need, Int8Matmul.caps)
    for other in ("int8:row", "int8:g48/group", "fp8:row/token", "int8:g32+zero"):
        assert compare(LinearNeed(encoding=other, in_features=64), Int8Matmul.caps)
    wide = LinearNeed(encoding="int8:row/token", in_features=70000)
    assert "between 1 and 65536" in compare(wide, Int8Matmul.caps)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 8, 64), (5, 7, 70), (33, 48, 96)])
def test_on_the_gpu(encoding: str, t: int, n: int, k: int) -> None:
    record = layer(encoding, n, k)
    kernel = build("cuda", n, k, encoding)
    x = torch.randn(t, k)
    got = kernel.run(kernel.prepare(record, torch.device("cuda")), x.cuda())
    assert np.allclose(got.cpu().numpy(), reference(record, x.numpy()), rtol=2e-6, atol=2e-5)
