"""Gemma 2: norms before and after each branch, alternating windows, soft-capped scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, rope, sandwich_layer


class Gemma2:
    """Sandwich-norm decoder with 1 + w norms: GQA with softcap, every other layer sliding."""

    name: ClassVar[str] = "gemma2"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"Gemma2ForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Gemma2:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "Gemma2ForCausalLM")
        max_position = view.integer("max_position_embeddings", 8192)
        num_layers = view.integer("num_hidden_layers")
        shape = heads(view, default_size=256)
        norm = {"eps": view.number("rms_norm_eps", 1e-6), "variant": "1p"}
        bias = view.flag("attention_bias", False)
        attention = {
            **shape,
            "rope": "rope",
            "scale": view.number("query_pre_attn_scalar", 256) ** -0.5,
            # A null softcap means none; an absent key means the architecture's 50.
            "softcap": view.nullable("attn_logit_softcapping", 50.0) or 0.0,
            "qkv_bias": bias,
            "o_bias": bias,
        }
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation("hidden_activation", "gelu_pytorch_tanh"),
        }
        window = view.window(max_position, default=4096)
        kinds = view.layer_types(
            num_layers,
            ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        )
        layers = []
        for i, kind in enumerate(kinds):
            prefix = f"model.layers.{i}"
            here = {**attention, "window": window if kind == "sliding_attention" else 0}
            layers.append(
                sandwich_layer(
                    prefix,
                    norm,
                    Node("gqa", f"{prefix}.self_attn", here),
                    Node("mlp", f"{prefix}.mlp", mlp),
                )
            )
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=True,
            softcap=view.nullable("final_logit_softcapping", 30.0) or 0.0,
            embed_scale=math.sqrt(view.integer("hidden_size")),
        )
