"""Mistral 7B, Nemo and Small: Llama's layers, an optional sliding window, explicit head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, pre_norm_layer, rope


class Mistral:
    """Pre-norm decoder: GQA with RoPE and an optional window on every layer, SwiGLU."""

    name: ClassVar[str] = "mistral"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"MistralForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Mistral:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "MistralForCausalLM")
        max_position = view.integer("max_position_embeddings", 131072)
        shape = heads(view)
        norm = {"eps": view.number("rms_norm_eps", 1e-6)}
        attention = {**shape, "rope": "rope", "window": view.window(max_position, 4096)}
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation(),
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
            {"rope": rope(view, shape["head_size"], max_position)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
        )
