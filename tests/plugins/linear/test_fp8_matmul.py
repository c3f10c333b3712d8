"""FP8 products against float64 sums over codes that are rounded one by one."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearNeed, PluginContext, QuantTensor
from cardcage.plugins.linear._activations import ceil_power_of_two
from cardcage.plugins.linear.fp8_matmul import Fp8Matmul, Fp8MatmulOptions
from cardcage.plugins.linear.fp8_matmul.kernel import scaled_product_works
from tests.support import quant_numpy as q

F32 = np.float32
CASES = [
    "fp8:row/token", "fp8:row/token_bound", "fp8:row/static", "fp8:g32/group",
    "fp8:g32/group_ue8m0", "fp8:g32/token",
]  # fmt: skip


def kernel(
    encoding: str, n: int, k: int, dtype: str = "float32", device: str = "cpu", **options: Any
) -> Any:
    need = LinearNeed(
        encoding=encoding, device_type=device, dtype=dtype, in_features=k, out_features=n
    )
    ctx = PluginContext(logging.getLogger("test"), {}, time.monotonic, Path())
    return Fp8Matmul().build(need, ctx, Fp8MatmulOptions(**options))


def layer(encoding: str, n: int, k: int, seed: int = 0) -> tuple[QuantTensor, np.ndarray]:
    """A random weight and its float32 values [N, K]."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 120, (n, k)).astype(np.uint8) | (rng.integers(0, 2, (n, k)) << 7).astype(
        np.uint8
    )
    group = 32 if ":g32" in encoding else k
    scale = rng.uniform(0.001, 0.01, (n, -(-k // group))).astype(F32)
    parts = {
        "weight": torch.from_numpy(raw).view(torch.float8_e4m3fn), "scale": torch.from_numpy(scale)
    }  # fmt: skip
    if encoding.endswith("/static"):
        parts["input_scale"] = torch.full((n, 1), 0.01)
        parts["input_scale"][0] = 0.02  # a component of its own: the larger one holds for all
    if encoding.endswith("_bound"):
        parts["input_bound"] = torch.full((n, 1), 1.5)
    values = q.scaled(q.E4M3[raw], scale, 1, group)
    unused: Any = None
    return QuantTensor(encoding, (n, k), parts, unused, unused), values


def rounded(x: np.ndarray, encoding: str) -> np.ndarray:
    """x [T, K] float32 as its e4m3 codes mean it, one value at a time."""
    act = encoding.split("/")[1]
    group = 32 if act.startswith("group") else x.shape[1]
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for at in range(0, x.shape[1], group):
            part = x[t, at : at + group]
            amax = F32(np.abs(part).max())
            if act == "token_bound":
                amax = min(amax, F32(1.5))
            scale = max(F32(amax / F32(448)), F32(1 / (448 * 512)))
            if act == "group_ue8m0":
                scale = F32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            if act == "static":
                scale = F32(0.02)
            for i, v in enumerate(part):
                code = q.E4M3[q.nearest_e4m3(float(F32(v / scale)))]
                out[t, at + i] = code * np.float64(scale)
    return out


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 16, 64), (5, 7, 70), (17, 24, 96)])
def test_against_codes(encoding: str, t: int, n: int, k: int, streaming: bool) -> None:
    record, values = layer(encoding, n, k)
    run = kernel(encoding, n, k, emulation="streaming" if streaming else "cached")
    handle = run.prepare(record, torch.device("cpu"))
    x = torch.randn(t, k, generator=torch.Generator().manual_seed(t))
    x[0, 3] = 40.0
    if t > 1:
        x[1] = 0
    bias = torch.randn(n)
    inputs = rounded(x.numpy(), encoding)
    size = np.abs(inputs) @ np.abs(values.astype(np.float64)).T
    for b in (None, bias):
        got = run.run(handle, x, b)
        want = inputs @ values.astype(np.float64).T + (0 if b is None else b.numpy())
        assert got.dtype == torch.float32
        assert np.all(np.abs(got.numpy() - want) <= 1e-6 * size + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", CASES)
def test_half_precision(encoding: str, dtype: torch.dtype) -> None:
    """Within one rounding of the compute dtype and one of a bfloat16 sum."""
    record, values = layer(encoding, 24, 96)
    run = kernel(encoding, 24, 96, str(dtype).removeprefix("torch."))
    handle = run.prepare(record, torch.device("cpu"))
    x = torch.randn(6, 96).to(dtype)
    inputs = rounded(x.float().numpy(), encoding)
    got = run.run(handle, x)
    assert got.dtype == dtype
    size = np.abs(inputs) @ np.abs(values.astype(np.float64)).T
    want = inputs @ values.astype(np.float64).T
    assert np.all(np.abs(got.float().numpy() - want) <= 2.0**-7 * size)


@pytest.mark.parametrize("encoding", CASES)
def test_rows_do_not_see_their_neighbours(encoding: str) -> None:
    record, _ = layer(encoding, 16, 64)
    run = kernel(encoding, 16, 64)
    handle = run.prepare(record, torch.device("cpu"))
    x = torch.randn(9, 64)
    x[4] *= 1000
    alone = torch.cat([run.run(handle, row[None]) for row in x])
    assert torch.allclose(run.run(handle, x), alone, rtol=1e-5, atol=1e-4)


def test_powers_of_two() -> None:
    x = torch.tensor([1.0, 1.0001, 2.0, 3.0, 0.25, 0.2500001, 2.0**-126, 7e-5])
    want = [1.0, 2.0, 2.0, 4.0, 0.25, 0.5, 2.0**-126, 2.0**-13]
    assert ceil_power_of_two(x).tolist() == pytest.approx(want, rel=0, abs=0)


def test_which_way_is_in_the_layout() -> None:
    assert kernel("fp8:row/token", 16, 32).layout_id == "fp8_matmul.cached.1"
    streaming = kernel("fp8:row/token", 16, 32, emulation="streaming")
    assert streaming.layout_id == "fp8_matmul.streaming.1"


def test_what_it_takes() -> None:
    from cardcage.core.resolver import compare

    caps = Fp8Matmul.caps
    assert not compare(LinearNeed(encoding="fp8:g128/group"), caps)
    for other in ("fp8:row", "fp8:g48/group", "int8:row/token", "none", "fp8:row/token_asym"):
        assert compare(LinearNeed(encoding=other), caps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize("t", [1, 7, 16, 33, 128])
def test_on_the_gpu(encoding: str, t: int, dtype: str) -> None:
    """Native or emulated, as the device has it, against the host's emulation."""
    n, k = 192, 256
    record, values = layer(encoding, n, k)
    run = kernel(encoding, n, k, dtype, "cuda")
    if scaled_product_works("cuda") and ":row" in encoding:
        assert run.layout_id == "fp8_matmul.scaled.1"
    handle = run.prepare(record, torch.device("cuda"))
    x = torch.randn(t, k, dtype=getattr(torch, dtype), device="cuda")
    inputs = rounded(x.float().cpu().numpy(), encoding)
    got = run.run(handle, x).float().cpu().numpy()
    size = np.abs(inputs) @ np.abs(values.astype(np.float64)).T
    tolerance = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    assert np.all(np.abs(got - inputs @ values.astype(np.float64).T) <= tolerance * size)
