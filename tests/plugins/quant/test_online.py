"""Encoding at load: codes against element-wise arithmetic, shards, what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from cardcage.core.contracts import LinearDesc, QuantNeed, TensorMeta
from cardcage.core.errors import CheckpointError, PluginError
from cardcage.core.runtime.weights import join_rows
from cardcage.plugins.quant.online import Online, OnlineOptions
from tests.support import quant_numpy as q

F32 = np.float32


def weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * 0.1).to(dtype)


def encode(w: np.ndarray, family: str, rows: int, cols: int) -> np.ndarray:
    """What quantizing w in blocks of rows x cols gives, value by value in float32."""
    out = np.zeros_like(w, dtype=F32)
    limit = F32(448 if family == "fp8" else 127)
    for r in range(0, w.shape[0], rows):
        for c in range(0, w.shape[1], cols):
            block = w[r : r + rows, c : c + cols]
            amax = F32(np.abs(block).max())
            scale = F32(amax / limit) if amax > 0 else F32(1)
            for i, j in np.ndindex(block.shape):
                x = F32(block[i, j] / scale)
                code = q.e4m3(q.nearest_e4m3(float(x))) if family == "fp8" else np.round(x)
                out[r + i, c + j] = F32(code) * scale
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("scheme", "family", "rows", "cols", "encoding"),
    [
        ("fp8_per_tensor", "fp8", 12, 24, "fp8:row/token"),
        ("fp8_per_channel", "fp8", 1, 24, "fp8:row/token"),
        ("fp8_per_block", "fp8", 128, 128, "fp8:row/token"),
        ("int8", "int8", 1, 64, "int8:row/token"),
        ("int8_per_channel", "int8", 1, 24, "int8:row/token"),
        ("int8_per_channel_weight_only", "int8", 1, 24, "int8:row"),
    ],
)
def test_codes(scheme: str, family: str, rows: int, cols: int, encoding: str,
               dtype: torch.dtype) -> None:  # fmt: skip
    w = weight(12, 24, dtype)
    w[3] = 0
    got = q.record(q.build(Online, None, scheme=scheme), {"a.weight": w}, "a", 12, 24)
    assert got.encoding == encoding
    expected = torch.from_numpy(encode(w.float().numpy(), family, rows, cols))
    assert torch.equal(got.decode(got), expected)


@pytest.mark.parametrize(
    ("scheme", "rows"), [("fp8_per_block", 128), ("int8_per_group", 1), ("fp8_per_group", 1)]
)
def test_blocks_with_edges(scheme: str, rows: int) -> None:
    w, family = weight(140, 260), scheme.partition("_")[0]
    quantizer = q.build(Online, None, scheme=scheme, scales="largest")
    got = q.record(quantizer, {"a.weight": w}, "a", 140, 260)
    cols = {"fp8_per_group": 32, "int8_per_group": 64}.get(scheme, 128)
    assert got.encoding == f"{family}:g{cols}/group"
    assert torch.equal(
        got.decode(got), torch.from_numpy(encode(w.float().numpy(), family, rows, cols))
    )


def test_a_weight_of_zeros_and_tiny_numbers() -> None:
    for scheme in ("fp8", "int8", "fp8_per_block"):
        quantizer = q.build(Online, None, scheme=scheme)
        zero = q.record(quantizer, {"a.weight": torch.zeros(4, 8)}, "a", 4, 8)
        assert torch.equal(zero.parts["scale"], torch.ones(4, 1))
        assert torch.equal(zero.decode(zero), torch.zeros(4, 8))
        tiny = q.record(quantizer, {"a.weight": torch.full((4, 8), 1e-44)}, "a", 4, 8)
        assert bool(torch.isfinite(tiny.decode(tiny)).all())
    with pytest.raises(CheckpointError, match=r"a\.weight holds NaN"):
        q.record(quantizer, {"a.weight": torch.full((2, 2), torch.nan)}, "a", 2, 2)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "scheme",
    ["fp8", "fp8_per_tensor", "fp8_per_channel", "int8_per_channel", "int8", "fp8_per_block"],
)
def test_shards_share_the_scales_of_the_whole(scheme: str, axis: int) -> None:
    """Two ranks that reduce magnitudes over the sharded axis get the unsharded codes, bitwise."""
    w = weight(256, 512)
    w[:, 300:] *= 3
    w[200:] *= 5
    options = OnlineOptions(scheme=scheme)
    whole = q.record(Online().build(QuantNeed(), q.context(None), options), {"a.weight": w}, "a",
                     256, 512)  # fmt: skip
    shards = w.chunk(2, axis)
    # the collective, simulated: first collect each rank's magnitudes, then hand out the maximum
    seen: list[torch.Tensor] = []
    spans = scheme == "fp8_per_tensor" or (
        axis == 1 and scheme in ("fp8_per_channel", "int8_per_channel")
    )

    def run(reduce_max: Any) -> list[Any]:
        ctx = q.context(None, reduce_max=reduce_max)
        quantizer = Online().build(QuantNeed(), ctx, options)
        return [
            q.record(quantizer, {"a.weight": s}, "a", int(s.shape[0]), int(s.shape[1]))
            for s in shards
        ]

    run(lambda desc, amax: (seen.append(amax), amax)[1])
    largest = torch.maximum(*seen) if spans else None
    records = run(lambda desc, amax: amax if largest is None else largest)
    codes = torch.cat([r.parts["weight"].view(torch.uint8) for r in records], axis)
    assert torch.equal(codes, whole.parts["weight"].view(torch.uint8))
    values = torch.cat([r.decode(r) for r in records], axis)
    assert torch.equal(values, whole.decode(whole))


def test_components_keep_their_own_scale() -> None:
    quantizer = q.build(Online, None, scheme="fp8_per_tensor")
    records = [
        q.record(quantizer, {"a.weight": weight(n, 16, seed=n) * n}, "a", n, 16) for n in (4, 8)
    ]
    expected = torch.cat([r.decode(r) for r in records])
    (joined,) = join_rows(records)
    assert torch.equal(joined.decode(joined), expected)
    assert len(joined.parts["scale"].unique()) == 2


@pytest.mark.parametrize(
    ("name", "layer", "options", "expected"),
    [
        ("model.layers.0.mlp.up_proj", "linear", {}, "fp8_per_group"),
        ("model.layers.0.mlp.experts.3.up_proj", "moe", {}, "fp8_per_group"),
        ("model.layers.0.mlp.experts.3.up_proj", "moe", {"moe": "int8"}, "int8_per_group"),
        ("model.layers.0.mlp.up_proj", "linear", {"moe": "int8"}, "fp8_per_group"),
        ("lm_head", "linear", {}, "none"),
        ("model.layers.0.mlp.gate", "linear", {}, "none"),
        ("model.embed_tokens", "embedding", {}, "none"),
        ("lm_head", "linear", {"targets": {"lm_head": "int8"}}, "int8_per_group"),
        ("model.layers.0.mlp.down_proj", "linear", {"ignore": ["re:.*down_proj"]}, "none"),
        ("model.layers.0.mlp.down_proj", "linear", {"ignore": ["*.down_proj"]}, "none"),
        ("model.layers.0.mlp.down_proj", "linear", {"ignore": ["down_proj"]}, "fp8_per_group"),
        ("model.layers.0.mlp.down_proj", "linear",
         {"targets": {"*.down_proj": "fp8_per_channel", "*": "int8"}}, "fp8_per_channel"),
        ("model.layers.0.mlp.up_proj", "linear", {"targets": {"re:.*down": "none"}},
         "fp8_per_group"),
        ("model.layers.0.mlp.up_proj", "linear", {"scheme": "none"}, "none"),
    ],
)  # fmt: skip
def test_which_layers(name: str, layer: str, options: dict[str, Any], expected: str) -> None:
    quantizer = q.build(Online, None, **options)
    assert quantizer.scheme_of(LinearDesc(name, layer, 4, 4)) == expected


def test_left_alone_means_the_plain_record() -> None:
    quantizer = q.build(Online, None)
    desc, w = LinearDesc("lm_head", "linear", 4, 8), weight(4, 8)
    index = q.index_of({"lm_head.weight": w})
    got = quantizer.record(desc, {"lm_head.weight": w}, index, torch.float16)
    assert got.encoding == "none"
    assert got.parts["weight"].dtype == torch.float16


def test_inputs_left_alone() -> None:
    for scheme, encoding in (("fp8_per_tensor", "fp8:row"), ("int8", "int8:row")):
        quantizer = q.build(Online, None, scheme=scheme, activations="none")
        assert q.record(quantizer, {"a.weight": weight(4, 8)}, "a", 4, 8).encoding == encoding


def test_from_gguf_blocks() -> None:
    """Packed sources are read by their own quantizer, then encoded from its exact values."""
    from cardcage.plugins.quant.gguf import GgufQuant

    packed = torch.randint(0, 256, (6, 2 * 34), dtype=torch.uint8)
    packed.view(6, 2, 34)[:, :, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    index = {"a.weight": TensorMeta((6, 64), "packed", packed.numel(), "gguf:q8_0")}
    desc = LinearDesc("a", "linear", 6, 64)
    base = GgufQuant().build(QuantNeed(methods="gguf"), q.context(None), None)
    asked: list[Any] = []

    def resolve(kind: str, need: QuantNeed, use: str = "auto", **extras: Any) -> Any:
        asked.append((kind, need.methods, use))
        return base

    ctx = q.context(None, resolve=resolve)
    quantizer = Online().build(QuantNeed(methods="gguf"), ctx, OnlineOptions(scheme="int8"))
    assert asked == [("quant", "gguf", "gguf")]  # by name: "auto" would find this one again
    assert quantizer.slots(desc, index) == ("a.weight",)
    source = base.record(desc, {"a.weight": packed}, index, torch.float32)
    got = quantizer.record(desc, {"a.weight": packed}, index, torch.float32)
    expected = encode(source.decode(source).numpy(), "int8", 1, 64)
    assert torch.equal(got.decode(got), torch.from_numpy(expected))
    with pytest.raises(PluginError, match="no resolver"):
        Online().build(QuantNeed(methods="gguf"), q.context(None), OnlineOptions())


def test_options_are_checked() -> None:
    for wrong in ({"scheme": "fp4"}, {"shceme": "fp8"}, {"targets": {"a": "fp3"}}):
        with pytest.raises(pydantic.ValidationError):
            OnlineOptions(**wrong)


@pytest.mark.parametrize(("scheme", "width"), [("fp8_per_channel", 72), ("fp8_per_group", 32)])
def test_scales_of_least_error(scheme: str, width: int) -> None:
    """The best of 8 scales an octave, by trying each one; never worse than the largest's."""
    w = weight(6, 72, torch.float32)
    w[2] = 0
    errors = []
    for scales in ("largest", "least_error"):
        got = q.record(q.build(Online, None, scheme=scheme, scales=scales), {"a.weight": w}, "a",
                       6, 72)  # fmt: skip
        errors.append(float((got.decode(got) - w).square().sum()))
    assert errors[1] < errors[0]
    for row in range(6):
        for g, at in enumerate(range(0, 72, width)):
            part = w[row, at : at + width].numpy()
            base = F32(np.abs(part).max() / F32(448)) or F32(1)
            tried = {}
            for i in range(8):
                s = F32(base * F32(2.0 ** (i / 8)))
                codes = [q.e4m3(q.nearest_e4m3(float(F32(v / s)))) for v in part]
                tried[float(s)] = sum((c * float(s) - float(v)) ** 2 for c, v in zip(codes, part))
            chosen = float(got.parts["scale"][row, g])
            nearest = min(tried, key=lambda s: abs(s - chosen))
            assert chosen == pytest.approx(nearest, rel=1e-6)
            assert tried[nearest] <= min(tried.values()) * (1 + 1e-4)


def test_where_least_error_is_refused() -> None:
    for wrong in (
        {"scheme": "fp8_per_tensor"},
        {"scheme": "int8"},
        {"scheme": "fp8_per_group", "moe": "fp8_per_block"},
    ):
        with pytest.raises(pydantic.ValidationError, match="least_error"):
            OnlineOptions(scales="least_error", **wrong)
    options = OnlineOptions(scheme="fp8_per_channel", scales="least_error")
    with pytest.raises(PluginError, match="shards"):
        Online().build(QuantNeed(), q.context(None, reduce_max=lambda d, a: a), options)
