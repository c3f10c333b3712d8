"""From GGUF metadata to a Hugging Face style config dictionary, one small table per architecture.

Only what the file says is used; a number that the format leaves out but the model needs is
filled in here with its origin in a comment. Keys are those of the model's own `config.json`, so
a `models` plugin cannot tell which container a checkpoint came from.

Source: the GGUF specification; metadata written by llama.cpp's converter (observed), config
classes of transformers (field names and defaults).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from cardcage.core.errors import CheckpointError, UnsupportedModel
from cardcage.plugins.loaders.gguf.reader import GgufFile

Config = dict[str, Any]


class Meta:
    """Metadata of one architecture: `get("attention.head_count")` reads `{arch}.attention...`."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.raw: Mapping[str, Any] = file.metadata
        arch = self.raw.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{file.path.name}: general.architecture is missing")
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(f"{self.arch}.{key}", default)
        return short_float(value) if isinstance(value, float) else value

    def number(self, key: str) -> Any:
        """A required number; a per-layer list is accepted when all its values are equal."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModel(
                    f"{self.file.path.name}: {self.arch}.{key} differs by layer ({value[:4]}...), "
                    "which is not supported"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.file.path.name}: {self.arch}.{key} is missing or wrong")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def vector(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor (rope factors)."""
        info = self.file.tensors[tensor]
        if info.type.name != "f32" or info.nbytes > 1 << 20:
            raise CheckpointError(f"{self.file.path.name}: {tensor} is no small f32 vector")
        return list(struct.unpack_from(f"<{info.nbytes // 4}f", self.file.map, info.start))


def short_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.99999974e-06 -> 1e-05."""
    if not math.isfinite(value):
        return value
    packed = struct.pack("<f", value)
    for digits in range(6, 10):
        text = float(f"{value:.{digits}g}")
        if struct.pack("<f", text) == packed:
            return text
    return value


def hf_config(file: GgufFile) -> Config:
    """The config dictionary of the model in `file`.

    Raises:
        UnsupportedModel: an architecture that no table here covers.
        CheckpointError: required metadata or tensors are missing.
    """
    meta = Meta(file)
    build = ARCHITECTURES.get(meta.arch)
    if build is None:
        raise UnsupportedModel(
            f"{file.path.name}: GGUF architecture {meta.arch!r} is not supported; known: "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the safetensors checkpoint instead"
        )
    config = _common(meta)
    build(meta, config)
    _token_ids(meta, config)
    return config


def _common(meta: Meta) -> Config:
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{meta.file.path.name}: token_embd.weight is missing or no matrix")
    heads = meta.number("attention.head_count")
    hidden = meta.number("embedding_length")
    if not heads or embedding.shape[1] != hidden:
        raise CheckpointError(
            f"{meta.file.path.name}: {heads} heads, embedding_length {hidden} and a "
            f"token_embd.weight of shape {list(embedding.shape)} do not fit together"
        )
    head_dim = meta.get("attention.key_length") or hidden // heads
    if (meta.get("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModel(
            f"{meta.file.path.name}: key and value heads differ in size "
            f"({head_dim} and {meta.get('attention.value_length')}), which is not supported"
        )
    kv_heads = meta.get("attention.head_count_kv")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if kv_heads is None
        else meta.number("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": meta.number("feed_forward_length"),
        "max_position_embeddings": meta.number("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        # 10000 is what every reader of the format assumes when the key is absent.
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "tie_word_embeddings": not meta.has("output.weight"),
        "hidden_act": "silu",
    }


def _rope_scaling(meta: Meta) -> Config | None:
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor")
    original = meta.get("rope.scaling.original_context_length")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor else None
    if kind == "yarn":
        if not factor or not original:
            raise CheckpointError(f"{meta.file.path.name}: yarn needs a factor and its context")
        scaling: Config = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            value = meta.get(f"rope.scaling.{key}")
            if value is not None:
                scaling[name] = value
        return scaling
    if kind == "longrope":
        return {"rope_type": "longrope"}  # completed by _phi3
    raise UnsupportedModel(f"{meta.file.path.name}: rope scaling {kind!r} is not supported")


def _llama3_scaling(meta: Meta, config: Config) -> Config:
    """Recover llama3 scaling from the table of frequency divisors that the converter writes.

    The file holds only the table, so the usual constants (1, 4, 8192) are tried and the table is
    computed again from them; one that differs is refused.
    """
    table = meta.vector("rope_freqs.weight")
    factor = short_float(max(table))
    guess = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dim = 2 * len(table)
    for i, stored in enumerate(table):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * i / dim)
        if wavelength < 8192 / 4:
            want = 1.0
        elif wavelength > 8192:
            want = factor
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            want = 1 / ((1 - smooth) / factor + smooth)
        if abs(stored - want) > 1e-4 * want:
            raise UnsupportedModel(
                f"{meta.file.path.name}: rope_freqs.weight is no llama3 scaling of factor "
                f"{factor} over 8192 positions (entry {i} is {stored}, expected {want:.6g})"
            )
    return guess


def _layer_types(meta: Meta, config: Config, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees the whole context, the others a window."""
    every = meta.get("attention.sliding_window_pattern", pattern)
    layers = config["num_hidden_layers"]
    if isinstance(every, list):  # one flag per layer: true for a window
        return ["sliding_attention" if flag else "full_attention" for flag in every[:layers]]
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _llama(meta: Meta, config: Config) -> None:
    if meta.has("rope_freqs.weight"):
        config["rope_scaling"] = _llama3_scaling(meta, config)
    experts = meta.get("expert_count", 0)
    window = meta.get("attention.sliding_window", 0)
    if experts:
        config.update(architectures=["MixtralForCausalLM"], model_type="mixtral",
                      num_local_experts=experts,
                      num_experts_per_tok=meta.number("expert_used_count"))  # fmt: skip
    elif window:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral")
    else:
        config.update(architectures=["LlamaForCausalLM"], model_type="llama",
                      attention_bias=meta.has("blk.0.attn_q.bias"),
                      mlp_bias=meta.has("blk.0.ffn_up.bias"))  # fmt: skip
    if window:
        config["sliding_window"] = window


def _qwen2(meta: Meta, config: Config) -> None:
    config.update(architectures=["Qwen2ForCausalLM"], model_type="qwen2",
                  use_sliding_window=False)  # fmt: skip


def _qwen3(meta: Meta, config: Config) -> None:
    config.update(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False,
                  use_sliding_window=False)  # fmt: skip


def _qwen3moe(meta: Meta, config: Config) -> None:
    config.update(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        attention_bias=False,
        use_sliding_window=False,
        num_experts=meta.number("expert_count"),
        num_experts_per_tok=meta.number("expert_used_count"),
        moe_intermediate_size=meta.number("expert_feed_forward_length"),
        norm_topk_prob=True,  # true of every released model; the format has no key for it
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma2(meta: Meta, config: Config) -> None:
    config.update(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=meta.get("attention.sliding_window", 4096),
        layer_types=_layer_types(meta, config, 2),
        attn_logit_softcapping=meta.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=meta.get("final_logit_softcapping", 30.0),
        # The 27B model (46 layers) alone scales by hidden / heads; the format has no key.
        query_pre_attn_scalar=_query_scalar(meta, config, layers_27b=46),
    )
    config.pop("hidden_act")


def _gemma3(meta: Meta, config: Config) -> None:
    config.update(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=meta.number("attention.sliding_window"),
        layer_types=_layer_types(meta, config, 6),
        rope_theta=meta.get("rope.freq_base", 1_000_000.0),
        rope_local_base_freq=meta.get("rope.freq_base_swa", 10000.0),
        attn_logit_softcapping=None,
        final_logit_softcapping=meta.get("final_logit_softcapping"),
        # As for gemma2: only the 27B model, here with 62 layers.
        query_pre_attn_scalar=_query_scalar(meta, config, layers_27b=62),
    )
    config.pop("hidden_act")


def _query_scalar(meta: Meta, config: Config, layers_27b: int) -> float:
    scale = meta.get("attention.scale")
    if scale:
        return round(float(scale) ** -2, 3)
    if config["num_hidden_layers"] == layers_27b:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(meta: Meta, config: Config) -> None:
    head_dim = config["head_dim"]
    config.update(architectures=["Phi3ForCausalLM"], model_type="phi3")
    config["partial_rotary_factor"] = meta.get("rope.dimension_count", head_dim) / head_dim
    window = meta.get("attention.sliding_window", 0)
    if window:
        config["sliding_window"] = window
    original = meta.get("rope.scaling.original_context_length")
    if original:
        config["original_max_position_embeddings"] = original
    if meta.has("rope_factors_long.weight") and meta.has("rope_factors_short.weight"):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": [short_float(v) for v in meta.vector("rope_factors_long.weight")],
            "short_factor": [short_float(v) for v in meta.vector("rope_factors_short.weight")],
        }
        factor = meta.get("rope.scaling.attn_factor")
        if factor is not None:
            config["rope_scaling"]["attention_factor"] = factor


def _olmo2(meta: Meta, config: Config) -> None:
    if meta.get("attention.sliding_window"):
        raise UnsupportedModel(
            f"{meta.file.path.name}: an olmo2 file with sliding windows (OLMo 3) is not supported"
        )
    config.update(architectures=["Olmo2ForCausalLM"], model_type="olmo2", attention_bias=False)


ARCHITECTURES: dict[str, Callable[[Meta, Config], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}


def _token_ids(meta: Meta, config: Config) -> None:
    for name in ("bos", "eos"):
        value = meta.raw.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and 0 <= value < config["vocab_size"]:
            config[f"{name}_token_id"] = value


def generation_config(file: GgufFile) -> Config:
    """Recommended sampling values that the file carries, under Hugging Face names."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
    found = {}
    for key, name in names.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = short_float(value) if isinstance(value, float) else value
    return found
