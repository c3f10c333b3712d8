"""The Triton kernels for groups of columns against the reference in plain torch."""

from __future__ import annotations

import shutil

import pytest
import torch

from cardcage.plugins.linear._activations import fp8_dynamic, int8_dynamic, parse, spread
from cardcage.plugins.linear._w8a8_kernels import decode, multiply, quantize

DEVICE = "cuda" if shutil.which("nvidia-smi") else "cpu"  # the interpreter runs on host tensors
CASES = [
    "fp8:g32/group", "fp8:g128/group", "fp8:g64/group_ue8m0", "fp8:g64/token", "int8:g32/group",
    "int8:g128/group", "int8:g64/token",
]  # fmt: skip


def inputs(t: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(t, k, generator=torch.Generator().manual_seed(t)).to(dtype)
    x[0, 3] = 300.0
    x[-1] = 0
    return x


@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize(("t", "k"), [(1, 64), (5, 200), (3, 1100)])
def test_codes_are_those_of_the_reference(encoding: str, t: int, k: int) -> None:
    scheme, x = parse(encoding), inputs(t, k)
    codes, scales = quantize(x.to(DEVICE), scheme)
    if scheme.family == "fp8":
        want, scale = fp8_dynamic(x, scheme, None)
    else:
        want, scale, _ = int8_dynamic(x, scheme)
    assert torch.equal(scales.cpu(), scale)
    assert torch.equal(codes.cpu(), want.view(torch.uint8))


@pytest.mark.parametrize("encoding", CASES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 24, 64), (5, 37, 200), (17, 70, 256), (40, 16, 96)])
def test_product(encoding: str, t: int, n: int, k: int) -> None:
    """Against float64 sums over the same codes."""
    scheme = parse(encoding)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    if scheme.family == "fp8":
        raw[(raw & 127) == 127] = 0
    groups = -(-k // scheme.group)
    ws = torch.rand(n, groups, generator=generator) * 0.01
    codes, scales = quantize(inputs(t, k).to(DEVICE), scheme)
    native = DEVICE == "cuda" and scheme.family == "fp8"
    kind = torch.float8_e4m3fn if scheme.family == "fp8" else torch.int8

    def numbers(c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return c.cpu().view(kind).double() * spread(s.cpu().double(), scheme.group, k)[:, :k]

    a, w = numbers(codes, scales), numbers(raw, ws)
    for bias in (None, torch.randn(n)):
        got = multiply(
            codes, scales, raw.to(DEVICE), ws.to(DEVICE), scheme,
            None if bias is None else bias.to(DEVICE), torch.float32, native,
        )  # fmt: skip
        want = a @ w.t() + (0 if bias is None else bias.double())
        # the matrix unit sums e4m3 products in fewer bits than float32
        bound = 2e-3 if native else 1e-6
        size = a.abs() @ w.abs().t() + 1
        assert bool(((got.cpu().double() - want).abs() <= bound * size).all())
    assert multiply(codes[:0], scales[:0], raw.to(DEVICE), ws.to(DEVICE), scheme, None,
                    torch.float32, native).shape == (0, n)  # fmt: skip


@pytest.mark.parametrize("encoding", CASES)
def test_decoding_for_many_rows(encoding: str) -> None:
    """Code times scale, exactly, for inputs and weights."""
    scheme = parse(encoding)
    kind = torch.float8_e4m3fn if scheme.family == "fp8" else torch.int8
    codes, scales = quantize(inputs(5, 200).to(DEVICE), scheme)
    want = codes.cpu().view(kind).float() * spread(scales.cpu(), scheme.group, 200)
    assert torch.equal(decode(codes, scales, scheme, torch.float32).cpu(), want)
    half = decode(codes, scales, scheme, torch.float16)
    assert torch.equal(half.cpu(), want.half())


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", [*CASES, "fp8:row/token", "int8:row/token"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_of_the_plugins_in_a_graph(encoding: str, dtype: str) -> None:
    """What the plugins build on a GPU equals the host's emulation and replays in a graph."""
    import logging
    import time
    from pathlib import Path
    from typing import Any

    from cardcage.core.contracts import LinearNeed, PluginContext, QuantTensor
    from cardcage.plugins.linear.fp8_matmul import Fp8Matmul, Fp8MatmulOptions
    from cardcage.plugins.linear.int8_matmul import Int8Matmul

    scheme, n, k = parse(encoding), 192, 512
    raw = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    if scheme.family == "fp8":
        raw[(raw & 127) == 127] = 0
    kind = torch.float8_e4m3fn if scheme.family == "fp8" else torch.int8
    groups = -(-k // scheme.group) if scheme.group else 1
    parts = {"weight": raw.view(kind), "scale": torch.rand(n, groups) * 0.01}
    unused: Any = None
    ctx = PluginContext(logging.getLogger("test"), {}, time.monotonic, Path())
    plugin: Any = Fp8Matmul() if scheme.family == "fp8" else Int8Matmul()
    options = Fp8MatmulOptions() if scheme.family == "fp8" else None

    def built(device: str, name: str) -> tuple[Any, Any]:
        need = LinearNeed(
            encoding=encoding, device_type=device, dtype=name, in_features=k, out_features=n
        )
        kernel = plugin.build(need, ctx, options)
        record = QuantTensor(encoding, (n, k), dict(parts), unused, unused)
        return kernel, kernel.prepare(record, torch.device(device))

    gpu, handle = built("cuda", dtype)
    host, reference = built("cpu", "float32")
    for t in (1, 16, 33, 300):
        x = inputs(t, k, getattr(torch, dtype))
        bias = torch.randn(n).to(x.dtype)
        first = gpu.run(handle, x.cuda(), bias.cuda())
        graph = torch.cuda.CUDAGraph()
        held = x.cuda(), bias.cuda()
        with torch.cuda.graph(graph):
            again = gpu.run(handle, *held)
        graph.replay()
        assert torch.equal(first, again)
        want = host.run(reference, x.float(), bias.float())
        size = want.abs().amax(dim=1, keepdim=True) + 1e-6
        assert bool(((first.cpu().float() - want).abs() <= 2.0**-7 * size).all()), gpu.layout_id
