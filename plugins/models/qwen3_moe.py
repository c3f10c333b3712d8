"""Qwen3-MoE: Qwen3's attention, many small experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, pre_norm_layer, rope


class Qwen3Moe:
    """Pre-norm decoder: GQA with per-head q and k norms; experts, or an MLP on chosen layers."""

    name: ClassVar[str] = "qwen3_moe"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"Qwen3MoeForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Qwen3Moe:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "Qwen3MoeForCausalLM")
        max_position = view.integer("max_position_embeddings", 32768)
        num_layers = view.integer("num_hidden_layers")
        shape = heads(view)
        norm = {"eps": view.number("rms_norm_eps", 1e-6)}
        bias = view.flag("attention_bias", False)
        # Unlike Qwen3, the window (rarely used) is on every layer.
        window = view.window(max_position) if view.flag("use_sliding_window", False) else 0
        attention = {
            **shape, **norm, "rope": "rope", "qk_norm": "head", "qkv_bias": bias, "o_bias": bias,
            "window": window,
        }  # fmt: skip
        experts = view.integer("num_experts", view.integer("num_local_experts", 128))
        moe = {
            "num_experts": experts,
            "top_k": view.integer("num_experts_per_tok", 8),
            "intermediate_size": view.integer("moe_intermediate_size", 768),
            "renorm": view.flag("norm_topk_prob", False),
            "activation": view.activation(),
        }
        mlp = {
            "intermediate_size": view.integer("intermediate_size", 6144),
            "activation": view.activation(),
        }
        every = view.integer("decoder_sparse_step", 1)
        dense = set(view.get("mlp_only_layers", ()))
        layers = []
        for i in range(num_layers):
            prefix = f"model.layers.{i}"
            sparse = i not in dense and (i + 1) % every == 0
            ffn = Node("moe", f"{prefix}.mlp", moe) if sparse else Node("mlp", f"{prefix}.mlp", mlp)
            layers.append(
                pre_norm_layer(prefix, norm, Node("gqa", f"{prefix}.self_attn", attention), ffn)
            )
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
        )
