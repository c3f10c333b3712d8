"""The oracle for model tests: a tiny random transformers model, saved, and ours loaded from it.

Every parameter is random (norms and biases too: their usual ones and zeros hide bugs), attention
is transformers' eager one, everything in float32.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.paged import DictSource, Host

TOLERANCE = 2e-4


class Oracle:
    """A transformers model with its saved config and weights."""

    def __init__(self, config: Any, seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        config._attn_implementation = "eager"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.hf = AutoModelForCausalLM.from_config(config).eval()
        randomise(self.hf, seed)
        with tempfile.TemporaryDirectory() as folder:
            self.hf.save_pretrained(folder)
            self.config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
            self.tensors = DictSource.of_folder(Path(folder)).tensors

    @property
    def source(self) -> DictSource:
        return DictSource(self.tensors)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]."""
        with torch.no_grad():
            return self.hf(torch.tensor([tokens]), use_cache=False).logits[0]

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Greedy ids by full recomputation, so no cache of transformers is involved."""
        out: list[int] = []
        while len(out) < count:
            out.append(int(self.logits(tokens + out)[-1].argmax()))
        return out

    def tokens(self, count: int, seed: int = 1) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.hf.config.vocab_size, (count,), generator=generator).tolist()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Matrices N(0, 0.2), embeddings N(0, 1), vectors N(0, 0.3) around what they usually are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                usual = 1.0 if p.float().mean() > 0.5 else 0.0
                p.copy_(usual + 0.3 * noise)
            else:
                p.copy_(noise * (1.0 if "embed" in name else 0.2))


def check(oracle: Oracle, plugin: Any, **host_options: Any) -> Host:
    """Everything that must hold for a family: prefill, chunks, decode, strangers, greedy ids."""
    desc = plugin.describe(oracle.config)
    host = Host(desc, oracle.source, **host_options)
    for count in (1, 37, 100):
        tokens = oracle.tokens(count)
        want = oracle.logits(tokens)
        close(host.prefill(tokens), want, f"prefill of {count}")
    tokens = oracle.tokens(37)
    want = oracle.logits(tokens)
    for chunks in ([1], [8, 8, 8], [3, 1, 13, 2], [36], [1] * 37):
        close(host.prefill(tokens, chunks), want, f"chunks {chunks}")
    _strangers(oracle, host)
    assert host.greedy(tokens, 16) == oracle.greedy(tokens, 16)
    return host


def _strangers(oracle: Oracle, host: Host) -> None:
    """Two requests interleaved in the same steps do not see each other."""
    a, b = oracle.tokens(23, seed=2), oracle.tokens(30, seed=3)
    got_a, got_b = [], []
    for step in range(8):
        part_a, part_b = a[step * 3 : step * 3 + 3], b[step * 4 : step * 4 + 4]
        work = [(name, part) for name, part in (("b", part_b), ("a", part_a)) if part]
        rows = host.step(work)
        got_b.append(rows[: len(part_b)])
        got_a.append(rows[len(part_b) :])
    close(torch.cat(got_a), oracle.logits(a), "interleaved")
    close(torch.cat(got_b), oracle.logits(b), "interleaved")
    host.drop("a")
    host.drop("b")


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape, what
    worst = (got - want).abs().max().item()
    assert worst <= TOLERANCE, f"{what}: logits differ by {worst:.2e}"


def check_bfloat16(oracle: Oracle, plugin: Any, **host_options: Any) -> None:
    """bfloat16 runs end to end and stays near float32."""
    desc = plugin.describe(oracle.config)
    host = Host(desc, oracle.source, dtype=torch.bfloat16, **host_options)
    tokens = oracle.tokens(20)
    got, want = host.prefill(tokens), oracle.logits(tokens)
    assert torch.isfinite(got).all()
    hidden = torch.zeros(1, desc.hidden_size, dtype=torch.bfloat16)
    assert host.model.logits(hidden).dtype == torch.float32, "logits are never rounded"
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
    assert cosine.min() > 0.97, f"cosine {cosine.min().item():.3f}"


def base(**changes: Any) -> Mapping[str, Any]:
    """Sizes of a tiny model: three query heads per KV head, odd vocabulary."""
    sizes: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return {**sizes, **changes}
