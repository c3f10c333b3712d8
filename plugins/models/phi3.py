"""Phi-3, 3.5 and 4, dense text: fused projections, LongRoPE, partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, pre_norm_layer, rope


class Phi3:
    """Pre-norm decoder: GQA from one qkv tensor, SwiGLU from one gate_up tensor."""

    name: ClassVar[str] = "phi3"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"Phi3ForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Phi3:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "Phi3ForCausalLM")
        max_position = view.integer("max_position_embeddings", 4096)
        shape = heads(view)
        norm = {"eps": view.number("rms_norm_eps", 1e-5)}
        bias = view.flag("attention_bias", False)
        attention = {
            **shape,
            "rope": "rope",
            "fused_qkv": True,
            "qkv_bias": bias,
            "o_bias": bias,
            "window": view.window(max_position),
        }
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation(),
            "fused": True,
        }
        layers = [
            pre_norm_layer(
                f"model.layers.{i}",
                norm,
                Node("gqa", f"model.layers.{i}.self_attn", attention),
                Node("mlp", f"model.layers.{i}.mlp", mlp),
            )
            for i in range(view.integer("num_hidden_layers"))
        ]
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position, legacy_longrope=True)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
        )
