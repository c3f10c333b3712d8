"""RoPE: the rotation against complex numbers, every scaling type against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import RopeSpec
from cardcage.core.runtime.rope import Rope, inverse_frequencies


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


HOST = torch.device("cpu")


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "size"), [(8, 8), (6, 16), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_a_complex_product(
    pairing: str, dim: int, size: int, dtype: torch.dtype
) -> None:
    rope = Rope(RopeSpec(dim, 10000.0, pairing), 0, HOST, 64)
    positions = torch.tensor([0, 1, 5, 63])
    wide = torch.randn(4, 7, size)
    q = wide.to(dtype)[:, :3]  # strided, as a view of a fused product is
    k = wide.to(dtype)[:, 3:5]
    for x, got in zip((q, k), rope(q, k, positions), strict=True):
        angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
        spin = torch.polar(torch.ones_like(angles), angles)[:, None]
        part = x[..., :dim].double()
        if pairing == "half":
            z = torch.complex(part[..., : dim // 2], part[..., dim // 2 :]) * spin
            want = torch.cat([z.real, z.imag], -1)
        else:
            z = torch.complex(part[..., 0::2], part[..., 1::2]) * spin
            want = torch.stack([z.real, z.imag], -1).flatten(-2)
        want = torch.cat([want, x[..., dim:].double()], -1)
        assert got.dtype == dtype
        assert got.is_contiguous()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)
        assert torch.equal(got[..., dim:], x[..., dim:])


def test_rotation_depends_on_the_distance_alone() -> None:
    rope = Rope(RopeSpec(16, 10000.0), 0, HOST, 64)
    q, k = torch.randn(2, 1, 1, 16).unbind()
    scores = []
    for start in (0, 40):
        rotated_q, _ = rope(q, k, torch.tensor([start + 7]))
        _, rotated_k = rope(q, k, torch.tensor([start]))
        scores.append((rotated_q * rotated_k).sum())
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=1e-5)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + i / 10 for i in range(16)],
        "long_factor": [1.0 + i for i in range(16)],
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "factor": 16.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("served", [400, 2048, 4096])
def test_frequencies_equal_transformers(scaling: dict[str, Any], served: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={**scaling, "rope_theta": 50000.0},
    )
    kind = scaling["rope_type"]
    if kind == "default":
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, HOST, seq_len=served)
    spec = RopeSpec(32, 50000.0, scaling=scaling, max_position=2048)
    got, got_factor = inverse_frequencies(spec, served)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    assert got_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (RopeSpec(8, 1e4, scaling={"rope_type": "spiral"}), "spiral"),
        (RopeSpec(8, 1e4, scaling={"rope_type": "linear"}), "factor"),
        (RopeSpec(8, 1e4, scaling={"rope_type": "linear", "factor": "two"}), "factor"),
        (RopeSpec(7, 1e4), "even"),
        (RopeSpec(8, 1e4, pairing="thirds"), "thirds"),
    ],
)
def test_refusals(spec: RopeSpec, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        Rope(spec, 0, HOST, 64)


def test_attention_factor_scales_both_tables() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 2.0,
    }
    rope = Rope(RopeSpec(8, 1e4, scaling=scaling, max_position=64), 0, HOST, 64)
    cos, sin = rope.tables(torch.arange(5))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 4.0))
