"""The packed Triton product against decoded weights in float64: shapes, codes, act-order."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearNeed, PluginContext, QuantTensor
from cardcage.core.errors import CheckpointError
from cardcage.plugins.linear.triton_packed import TritonPacked, TritonPackedOptions
from cardcage.plugins.quant.awq import Awq
from cardcage.plugins.quant.gptq import Gptq
from cardcage.plugins.quant.online import Online
from tests.support import quant_numpy as q

DEVICE = "cuda" if shutil.which("nvidia-smi") else "cpu"  # the interpreter runs on host tensors


def kernel(record: QuantTensor, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    n, k = record.shape
    need = LinearNeed(
        encoding=record.encoding, device_type="cuda", arch=(9, 0), dtype=dtype, in_features=k,
        out_features=n,
    )  # fmt: skip
    ctx = PluginContext(logging.getLogger("test"), {}, time.monotonic, Path())
    built = TritonPacked().build(need, ctx, TritonPackedOptions(**options))
    return built, built.prepare(record, torch.device(DEVICE))


def gptq(bits: int, n: int, k: int, group: int, act_order: bool = False) -> QuantTensor:
    size = k if group == -1 else group
    codes, zero, scale = q.random_groups(bits, n, k, bits, size)
    tensors = q.gptq_tensors(codes, zero, scale, bits)
    if act_order:
        tensors["g_idx"] = (
            np.random.default_rng(0).permutation(np.arange(k) // size).astype(np.int32)
        )
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return q.record(q.build(Gptq, config), q.to_torch(tensors, "a"), "a", n, k)


def symmetric(n: int, k: int, group: int) -> QuantTensor:
    codes, _, scale = q.random_groups(1, n, k, 4, group)
    tensors = q.awq_tensors(codes, np.full(scale.shape, 8), scale, 4)
    config = {"quant_method": "awq", "bits": 4, "group_size": group}
    return q.record(q.build(Awq, config), q.to_torch(tensors, "a"), "a", n, k)


def online(scheme: str, n: int, k: int) -> QuantTensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    quantizer = q.build(Online, None, scheme=scheme, activations="none")
    return q.record(quantizer, {"a.weight": weight}, "a", n, k)


RECORDS = {
    "int4:g32+zero": lambda: gptq(4, 40, 96, 32),
    "int4:row+zero": lambda: gptq(4, 24, 96, -1),
    "int4:g128+zero": lambda: gptq(4, 16, 256, 128),
    "int4:g32": lambda: symmetric(40, 96, 32),
    "int2:g64+zero": lambda: gptq(2, 32, 192, 64),
    "int8:g64+zero": lambda: gptq(8, 20, 128, 64),
    "int4:g32+zero+gidx": lambda: gptq(4, 24, 96, 32, True),
    "int8:g32+zero+gidx": lambda: gptq(8, 24, 96, 32, True),
    "fp8:row": lambda: online("fp8_per_tensor", 37, 96),
    "fp8:g128": lambda: online("fp8_per_block", 37, 288),
    "int8:row": lambda: online("int8_per_channel", 37, 96),
    "int8:g64": lambda: online("int8", 21, 288),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("encoding", list(RECORDS))
def test_against_decoded_weights(encoding: str, dtype: str) -> None:
    record = RECORDS[encoding]()
    assert record.encoding == encoding
    weight = record.decode(record).double()
    run, handle = kernel(record, dtype)
    torch_dtype = getattr(torch, dtype)
    bias = torch.randn(record.shape[0]).to(torch_dtype)
    for t in (1, 17, 40):
        x = torch.randn(t, record.shape[1], generator=torch.Generator().manual_seed(t))
        x = x.to(torch_dtype)
        for b in (None, bias):
            got = run.run(handle, x.to(DEVICE), None if b is None else b.to(DEVICE))
            want = x.double() @ weight.t() + (0 if b is None else b.double())
            size = x.double().abs() @ weight.abs().t() + 1
            assert got.dtype == torch_dtype
            bound = 2.0**-10 if dtype == "float16" else 1e-6
            assert bool(((got.cpu().double() - want).abs() <= bound * size).all())


@pytest.mark.parametrize("encoding", list(RECORDS))
def test_many_rows_decode_first(encoding: str) -> None:
    record = RECORDS[encoding]()
    run, handle = kernel(record, dense_rows=1)
    weight = record.decode(record)
    dense = run.dense(handle, torch.float32).cpu()
    order = slice(None) if handle.perm is None else handle.perm.cpu()
    assert torch.equal(dense, weight[:, order])
    x = torch.randn(3, record.shape[1])
    got = run.run(handle, x.to(DEVICE)).cpu()
    assert torch.allclose(got, x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_every_e4m3_code() -> None:
    raw = torch.tensor([b for b in range(256) if b & 127 != 127] + [0, 0], dtype=torch.uint8)
    parts = {"weight": raw.view(1, 256).view(torch.float8_e4m3fn), "scale": torch.ones(1, 1)}
    unused: Any = None
    run, handle = kernel(QuantTensor("fp8:row", (1, 256), parts, unused, unused))
    dense = run.dense(handle, torch.float32).cpu()
    assert torch.equal(dense[0], torch.from_numpy(q.E4M3[raw.numpy()]).float())


def test_rows_do_not_see_their_neighbours() -> None:
    run, handle = kernel(RECORDS["int4:g32+zero"]())
    x = torch.randn(9, 96, device=DEVICE)
    alone = torch.cat([run.run(handle, row[None]) for row in x])
    assert torch.allclose(run.run(handle, x), alone, rtol=1e-5, atol=1e-5)


def test_strided_input_and_no_rows() -> None:
    run, handle = kernel(RECORDS["int8:row"]())
    wide = torch.randn(6, 192, device=DEVICE)
    assert torch.equal(run.run(handle, wide[:, :96]), run.run(handle, wide[:, :96].contiguous()))
    assert run.run(handle, wide[:0, :96]).shape == (0, 37)


def test_refusals() -> None:
    from cardcage.core.resolver import compare

    fits = LinearNeed(
        encoding="int4:g128", device_type="cuda", arch=(8, 0), dtype="bfloat16", in_features=64
    )
    assert not compare(fits, TritonPacked.caps)
    for change in (
        {"encoding": "int3:g128"}, {"encoding": "fp8:row/token"}, {"in_features": 40},
        {"device_type": "cpu"}, {"arch": (7, 5)},
    ):  # fmt: skip
        need = LinearNeed(**{**{f: getattr(fits, f) for f in fits.__dataclass_fields__}, **change})
        assert compare(need, TritonPacked.caps)
    uneven = gptq(4, 24, 96, 32, True)
    uneven.parts["gidx"] = torch.zeros(1, 96, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="unequal size"):
        kernel(uneven)


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", list(RECORDS))
def test_bfloat16_and_graphs_on_the_gpu(encoding: str) -> None:
    record = RECORDS[encoding]()
    weight = record.decode(record).double()
    run, handle = kernel(record, "bfloat16")
    for t in (1, 16, 33, 127, 200):
        x = torch.randn(t, record.shape[1], device="cuda").bfloat16()
        first = run.run(handle, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = run.run(handle, x)
        graph.replay()
        assert torch.equal(first, again)
        want = x.cpu().double() @ weight.t()
        size = x.cpu().double().abs() @ weight.abs().t()
        assert bool(((first.cpu().double() - want).abs() <= 2.0**-7 * size).all())
