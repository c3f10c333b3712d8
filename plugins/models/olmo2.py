"""OLMo 2: norms after each branch only, q and k normalised over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import Branch, LayerSpec, ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, rope


class Olmo2:
    """Post-norm decoder: GQA with full-width q and k norms, SwiGLU; norms in float32."""

    name: ClassVar[str] = "olmo2"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(architecture=frozenset({"Olmo2ForCausalLM"}))

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Olmo2:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        view = ConfigView(config, "Olmo2ForCausalLM")
        max_position = view.integer("max_position_embeddings", 2048)
        shape = heads(view)
        eps = view.number("rms_norm_eps", 1e-5)
        norm = {"eps": eps, "variant": "fp32"}
        bias = view.flag("attention_bias", False)
        attention = {
            **shape,
            "rope": "rope",
            "qk_norm": "full",
            "qk_norm_variant": "fp32",
            "eps": eps,
            "qkv_bias": bias,
            "o_bias": bias,
        }
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation(),
        }
        layers = []
        for i in range(view.integer("num_hidden_layers")):
            prefix = f"model.layers.{i}"
            after_attention = Node("rms", f"{prefix}.post_attention_layernorm", norm)
            after_mlp = Node("rms", f"{prefix}.post_feedforward_layernorm", norm)
            attend = Node("gqa", f"{prefix}.self_attn", attention)
            layers.append(
                LayerSpec(
                    (
                        Branch(attend, post_norm=after_attention),
                        Branch(Node("mlp", f"{prefix}.mlp", mlp), post_norm=after_mlp),
                    )
                )
            )
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=False,
        )
