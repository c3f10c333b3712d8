"""Mixtral: Mistral's attention, eight experts of which two run, their weights renormalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, pre_norm_layer, rope


class Mixtral:
    """Pre-norm decoder: GQA with RoPE, softmax-routed experts."""

    name: ClassVar[str] = "mixtral"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"MixtralForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Mixtral:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "MixtralForCausalLM")
        max_position = view.integer("max_position_embeddings", 131072)
        shape = heads(view)
        norm = {"eps": view.number("rms_norm_eps", 1e-5)}
        attention = {**shape, "rope": "rope", "window": view.window(max_position)}
        moe = {
            "num_experts": view.integer("num_local_experts", 8),
            "top_k": view.integer("num_experts_per_tok", 2),
            "intermediate_size": view.integer("intermediate_size"),
            "renorm": True,
            "activation": view.activation(),
        }
        layers = [
            pre_norm_layer(
                f"model.layers.{i}",
                norm,
                Node("gqa", f"model.layers.{i}.self_attn", attention),
                Node("moe", f"model.layers.{i}.block_sparse_moe", moe),
            )
            for i in range(view.integer("num_hidden_layers"))
        ]
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position, 1_000_000.0)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
            # transformers 5 calls the block mlp in memory
            aliases=((r"^(model\.layers\.\d+)\.mlp\.", r"\1.block_sparse_moe."),),
        )
