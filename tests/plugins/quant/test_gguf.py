"""GGUF codecs: goldens, the gguf package as oracle on random bytes, records and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardcage.core.contracts import LinearDesc, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.plugins.quant.gguf import GgufQuant
from cardcage.plugins.quant.gguf.codecs import CODECS, decode_packed

PROBES = [0, 1, 31, 32, 63, 64, 127, 128, 200, 255]


def record(encoding: str, packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> QuantTensor:
    codec = CODECS[encoding]
    n, k = packed.shape[0], packed.shape[1] // codec.nbytes * codec.elems
    quantizer = GgufQuant().build(None, None, None)  # type: ignore[arg-type]
    desc = LinearDesc("w", "linear", n, k)
    index = {"w.weight": TensorMeta((n, k), "packed", packed.numel(), encoding)}
    assert quantizer.slots(desc, index) == ("w.weight",)
    return quantizer.record(desc, {"w.weight": packed}, index, dtype)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gguf:q4_0", "0040809191a2a2b3b3c4c4d5d5e6e6f7f7f8"),
        ("gguf:q4_1", "224000cc80809191a2a2b3b3c4c4d5d5e6e6f7f7"),
    ],
)
def test_goldens_of_a_ramp(encoding: str, data: str) -> None:
    packed = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)[None]
    got = decode_packed(encoding, packed)[0]
    want = torch.arange(32.0) - 16
    step = 2.0 if encoding == "gguf:q4_0" else 31 / 15
    assert (got - want).abs().max() <= step  # q4_0's top value is cut off: 7 d
    assert (got - want).abs().mean() <= step / 3


@pytest.mark.parametrize(
    ("encoding", "halves", "want", "total"),
    [
        (
            "gguf:q4_k",
            {0: 0.01, 2: 0.02},
            [2.390511, -1.020218, 0.840179, -0.28006, 0.040009, 3.290703, 0.300064, 4.050865,
             1.130241, -0.040009],
            417.76923,
        ),
        (
            "gguf:q5_k",
            {0: 0.01, 2: 0.02},
            [7.35157, -1.020218, 0.840179, 0.760162, 0.440094, 3.290703, -0.540115, 10.292198,
             1.130241, 0.56012],
            1035.66119,
        ),
        (
            "gguf:q6_k",
            {208: 0.01},
            [-14.313057, 16.963623, -0.960205, 2.310493, -5.801239, -30.406494, 15.003204,
             -3.51075, 10.892326, -0.600128],
            46.12985,
        ),
    ],
)  # fmt: skip
def test_goldens_of_k_quants(
    encoding: str, halves: dict[int, float], want: list[float], total: float
) -> None:
    size = CODECS[encoding].nbytes
    block = (np.arange(size) * 37 + 11).astype(np.uint8)
    for at, number in halves.items():
        block[at : at + 2] = np.array([number], "<f2").view(np.uint8)
    got = decode_packed(encoding, torch.from_numpy(block)[None])[0]
    torch.testing.assert_close(got[PROBES], torch.tensor(want), atol=2e-5, rtol=1e-5)
    assert got.double().sum().item() == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("encoding", sorted(CODECS))
def test_random_bytes_equal_the_gguf_package_bit_by_bit(encoding: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = getattr(gguf.GGMLQuantizationType, encoding[5:].upper())
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    codec = CODECS[encoding]
    assert (codec.elems, codec.nbytes) == (elems, size)
    raw = np.random.default_rng(3).integers(0, 256, (64, 3 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, kind)
    got = decode_packed(encoding, torch.from_numpy(raw)).numpy()
    np.testing.assert_array_equal(got, want)  # NaN counts as equal to NaN


@pytest.mark.parametrize("encoding", ["gguf:q4_1", "gguf:q8_0", "gguf:q6_k"])
def test_rows_equal_the_whole(encoding: str) -> None:
    codec = CODECS[encoding]
    packed = torch.randint(0, 100, (6, 2 * codec.nbytes), dtype=torch.uint8)
    rec = record(encoding, packed)
    assert rec.shape == (6, 2 * codec.elems)
    whole = rec.decode(rec)
    assert whole.dtype == torch.float32
    ids = torch.tensor([5, 0, 0, 3])
    torch.testing.assert_close(
        rec.decode_rows(rec, ids), whole[ids], equal_nan=True, atol=0, rtol=0
    )


def test_the_packed_part_is_kept_as_it_lies() -> None:
    packed = torch.zeros(4, 20, dtype=torch.uint8)
    assert record("gguf:q4_1", packed).parts["packed"].data_ptr() == packed.data_ptr()


def test_plain_tensors_of_a_gguf_file() -> None:
    quantizer = GgufQuant().build(None, None, None)  # type: ignore[arg-type]
    weight = torch.randn(3, 4).half()
    index = {"w.weight": TensorMeta((3, 4), "float16", 24)}
    rec = quantizer.record(
        LinearDesc("w", "linear", 3, 4), {"w.weight": weight}, index, torch.bfloat16
    )
    assert rec.encoding == "none"
    assert rec.parts["weight"].dtype == torch.bfloat16
    assert torch.equal(rec.decode(rec), weight.bfloat16().float())


def test_refusals() -> None:
    quantizer = GgufQuant().build(None, None, None)  # type: ignore[arg-type]
    desc = LinearDesc("w", "linear", 4, 32)
    tensors = {"w.weight": torch.zeros(4, 18, dtype=torch.uint8)}
    index = {"w.weight": TensorMeta((4, 32), "packed", 72, "gguf:q9")}
    with pytest.raises(CheckpointError, match=r"gguf:q9.*known: .*q4_0"):
        quantizer.record(desc, tensors, index, torch.float32)
    index = {"w.weight": TensorMeta((4, 32), "packed", 72, "gguf:q4_1")}
    with pytest.raises(CheckpointError, match=r"needs uint8 \[4, 20\]"):
        quantizer.record(desc, tensors, index, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("encoding", sorted(CODECS))
def test_a_gpu_decodes_the_same_bits_inside_a_graph(encoding: str) -> None:
    size = CODECS[encoding].nbytes
    packed = torch.randint(0, 64, (32, 2 * size), dtype=torch.uint8)
    host = record(encoding, packed)
    device = record(encoding, packed.cuda())
    ids = torch.tensor([3, 31, 0], device="cuda")
    want = host.decode(host)
    torch.testing.assert_close(device.decode(device).cpu(), want, atol=0, rtol=0, equal_nan=True)
    device.decode_rows(device, ids)  # makes the constant tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = device.decode_rows(device, ids)
    ids.copy_(torch.tensor([1, 2, 30]))
    graph.replay()
    torch.testing.assert_close(rows.cpu(), want[[1, 2, 30]], atol=0, rtol=0, equal_nan=True)
