"""Gemma 3, text: five sliding layers to one full, each kind with a RoPE of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import ModelDesc, Node, RopeSpec
from cardcage.plugins.models._common import (
    ConfigView,
    decoder,
    heads,
    rope,
    rope_spec,
    sandwich_layer,
)

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3:
    """Sandwich-norm decoder with 1 + w norms: GQA with q and k norms, 5 sliding : 1 full."""

    name: ClassVar[str] = "gemma3"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(
        architecture=frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
    )

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Gemma3:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`. The image-and-text form is refused."""
        if "text_config" in config:
            raise UnsupportedModel(
                "Gemma3ForConditionalGeneration (config key 'text_config') reads images, which "
                "this version cannot; serve a text-only Gemma3ForCausalLM checkpoint instead"
            )
        view = ConfigView(config, "Gemma3ForCausalLM")
        max_position = view.integer("max_position_embeddings", 131072)
        num_layers = view.integer("num_hidden_layers")
        shape = heads(view, default_size=256)
        norm = {"eps": view.number("rms_norm_eps", 1e-6), "variant": "1p"}
        bias = view.flag("attention_bias", False)
        attention = {
            **shape,
            "scale": view.number("query_pre_attn_scalar", 256) ** -0.5,
            "qk_norm": "head",
            "qk_norm_variant": "1p",
            "eps": norm["eps"],
            "qkv_bias": bias,
            "o_bias": bias,
        }
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation("hidden_activation", "gelu_pytorch_tanh"),
        }
        window = view.window(max_position, default=4096)
        every = view.integer("sliding_window_pattern", 6)
        kinds = view.layer_types(
            num_layers,
            [
                "sliding_attention" if (i + 1) % every else "full_attention"
                for i in range(num_layers)
            ],
        )
        layers = []
        for i, kind in enumerate(kinds):
            prefix = f"model.layers.{i}"
            sliding = kind == "sliding_attention"
            here = {**attention, "rope": kind, "window": window if sliding else 0}
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
            _ropes(view, shape["head_size"], max_position),
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=True,
            softcap=view.nullable("final_logit_softcapping", 0.0) or 0.0,
            embed_scale=math.sqrt(view.integer("hidden_size")),
        )


def _ropes(view: ConfigView, head_size: int, max_position: int) -> dict[str, RopeSpec]:
    """One RoPE per layer type, from the nested form or from the older flat keys, whose scaling
    concerns the full layers only."""
    nested = view.get("rope_parameters", None)
    if nested and "full_attention" in nested:
        return {
            kind: rope(view, head_size, max_position, theta, kind)
            for kind, theta in (
                ("full_attention", _GLOBAL_THETA),
                ("sliding_attention", _LOCAL_THETA),
            )
        }
    local = view.number("rope_local_base_freq", _LOCAL_THETA)
    return {
        "full_attention": rope(view, head_size, max_position, _GLOBAL_THETA),
        "sliding_attention": rope_spec(
            view, "rope_local_base_freq", {}, local, head_size, max_position
        ),
    }
