"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import (
    ConfigView,
    decoder,
    heads,
    pre_norm_layer,
    qwen_windows,
    rope,
)


class Qwen2:
    """Pre-norm decoder: GQA with RoPE and q, k, v biases, SwiGLU; upper layers may slide."""

    name: ClassVar[str] = "qwen2"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"Qwen2ForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Qwen2:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "Qwen2ForCausalLM")
        max_position = view.integer("max_position_embeddings", 32768)
        shape = heads(view)
        norm = {"eps": view.number("rms_norm_eps", 1e-6)}
        attention = {**shape, "rope": "rope", "qkv_bias": True}
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation(),
        }
        windows = qwen_windows(view, view.integer("num_hidden_layers"), max_position)
        layers = [
            pre_norm_layer(
                f"model.layers.{i}",
                norm,
                Node("gqa", f"model.layers.{i}.self_attn", {**attention, "window": window}),
                Node("mlp", f"model.layers.{i}.mlp", mlp),
            )
            for i, window in enumerate(windows)
        ]
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
        )
