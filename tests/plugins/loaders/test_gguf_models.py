"""Whole models through GGUF: a random transformers model, written as the converter writes it,
read back and run, gives the same logits. Tensor names come from the gguf package."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.contracts import ModelNeed
from cardcage.plugins.loaders.gguf import Gguf
from cardcage.plugins.quant.gguf import GgufQuant
from tests.support import gguf_files as g
from tests.support.oracle import TOLERANCE, Oracle
from tests.support.paged import Host

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

BASE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 6,
         "tie_word_embeddings": True}  # fmt: skip
WINDOW = {"attention__sliding_window": 4}
HEADS = {"attention__key_length": 8, "attention__value_length": 8}
# config class, gguf architecture, models plugin, config changes, metadata changes
MODELS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LLAMA", "llama", {"attention_bias": True}, {}),
    "llama-tied": ("LlamaConfig", "LLAMA", "llama", {"tie_word_embeddings": True}, {}),
    "mixtral": (
        "MixtralConfig", "LLAMA", "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2, "rope__freq_base": 1_000_000.0},
    ),
    "qwen2": ("Qwen2Config", "QWEN2", "qwen2", {}, {}),
    "qwen3": ("Qwen3Config", "QWEN3", "qwen3", {"head_dim": 8}, HEADS),
    "qwen3moe": (
        "Qwen3MoeConfig", "QWEN3MOE", "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "norm_topk_prob": True},
        {**HEADS, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16},
    ),
    "gemma2": ("Gemma2Config", "GEMMA2", "gemma2", GEMMA,
               {**HEADS, **WINDOW, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3TextConfig", "GEMMA3", "gemma3", GEMMA,
               {**HEADS, **WINDOW, "rope__freq_base": 1_000_000.0}),
    "phi3": ("Phi3Config", "PHI3", "phi3", {}, {"rope__dimension_count": 8}),
    "olmo2": ("Olmo2Config", "OLMO2", "olmo2", {}, {}),
}  # fmt: skip


def converted(tensors: dict[str, torch.Tensor], arch: str, layers: int) -> list[g.Tensor]:
    """What a converter writes: other names, permuted rows, shifted norms, stacked experts."""
    kind = getattr(gguf.MODEL_ARCH, arch)
    names = gguf.get_tensor_name_map(kind, layers)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert:
            stacks.setdefault(name.replace(expert[0], "experts."), {})[int(expert[1])] = tensor
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = tensor.chunk(2, 1) if "gate_up" in name else (tensor,)
            labels = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for label, part in zip(labels, parts):
                full = f"{name.rpartition('.')[0]}.{label}.weight"
                stacks[full] = dict(enumerate(part))
        else:
            out[name] = tensor
    out |= {n: torch.stack([es[e] for e in sorted(es)]) for n, es in stacks.items()}
    written = []
    for name, tensor in out.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if arch == "LLAMA" and re.search(r"self_attn\.[qk]_proj", name):
            heads = 4 if ".q_proj" in name else 2
            tail = tensor.shape[1:]
            tensor = tensor.view(heads, 2, -1, *tail).transpose(1, 2).reshape(tensor.shape)
        if arch.startswith("GEMMA") and theirs.endswith("norm.weight"):
            tensor = tensor + 1
        raw = tensor.float().contiguous().numpy().astype("<f4").tobytes()
        written.append((theirs, tuple(tensor.shape), "f32", raw))
    return written


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    cls, arch, plugin, config, metadata = MODELS[name]
    oracle = Oracle(getattr(transformers, cls)(**{**BASE, **config}))
    layers = oracle.config["num_hidden_layers"]
    tensors = converted(oracle.tensors, arch, layers)
    full = g.llama(arch.lower(), block_count=layers, context_length=64, feed_forward_length=48,
                   **metadata)  # fmt: skip
    path = g.write(tmp_path / "m.gguf", full, tensors)
    source = Gguf().build(None, None, None).open(str(path))  # type: ignore[arg-type]
    module = import_module(f"cardcage.plugins.models.{plugin}")
    (declaration,) = (c for c in vars(module).values() if getattr(c, "name", "") == plugin)
    architecture = source.config["architectures"][0]
    assert architecture == oracle.config["architectures"][0]
    desc = (
        declaration()
        .build(ModelNeed(architecture=architecture), None, None)
        .describe(source.config)
    )
    quantizer = GgufQuant().build(None, None, None)  # type: ignore[arg-type]
    host = Host(desc, source.open_weights(), quantizer=quantizer)
    tokens = oracle.tokens(12)
    got = host.prefill(tokens).numpy()
    np.testing.assert_allclose(got, oracle.logits(tokens).numpy(), atol=TOLERANCE, rtol=1e-3)
