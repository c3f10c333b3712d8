"""Llama 2 and 3 and what shares their layout: SmolLM, TinyLlama, Yi, Vicuna; and SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cardcage.core.contracts import Caps, ModelCaps, ModelNeed
from cardcage.core.model_desc import ModelDesc, Node
from cardcage.plugins.models._common import ConfigView, decoder, heads, pre_norm_layer, rope


class Llama:
    """Pre-norm decoder: GQA with RoPE, SwiGLU. SmolLM3 leaves RoPE out of every fourth layer."""

    name: ClassVar[str] = "llama"
    api: ClassVar[str] = "models>=1.0,<2"
    caps: ClassVar[Caps] = ModelCaps(
        architecture=frozenset({"LlamaForCausalLM", "SmolLM3ForCausalLM"})
    )

    def build(self, need: ModelNeed, ctx: Any, options: Any) -> Llama:
        return self

    def describe(self, config: Mapping[str, Any]) -> ModelDesc:
        """See `ModelPlugin.describe`."""
        architecture = next(iter(config.get("architectures") or ("LlamaForCausalLM",)))
        view = ConfigView(config, architecture)
        smollm3 = architecture == "SmolLM3ForCausalLM"
        num_layers = view.integer("num_hidden_layers")
        max_position = view.integer("max_position_embeddings", 32768 if smollm3 else 2048)
        shape = heads(view)
        bias = view.flag("attention_bias", False)
        norm = {"eps": view.number("rms_norm_eps", 1e-6)}
        mlp = {
            "intermediate_size": view.integer("intermediate_size"),
            "activation": view.activation(),
            "bias": view.flag("mlp_bias", False),
        }
        with_rope = [True] * num_layers
        windows = [0] * num_layers
        if smollm3:
            with_rope, windows = _smollm3_layers(view, num_layers, max_position)
        layers = []
        for i in range(num_layers):
            prefix = f"model.layers.{i}"
            attention = {
                **shape,
                "rope": "rope" if with_rope[i] else None,
                "qkv_bias": bias,
                "o_bias": bias,
                "window": windows[i],
            }
            layers.append(
                pre_norm_layer(
                    prefix,
                    norm,
                    Node("gqa", f"{prefix}.self_attn", attention),
                    Node("mlp", f"{prefix}.mlp", mlp),
                )
            )
        theta = 2_000_000.0 if smollm3 else 10_000.0
        return decoder(
            view,
            layers,
            {"rope": rope(view, shape["head_size"], max_position, theta)},
            final_norm=Node("rms", "model.norm", norm),
            max_position=max_position,
            tied=smollm3,
        )


def _smollm3_layers(
    view: ConfigView, num_layers: int, max_position: int
) -> tuple[list[bool], list[int]]:
    """Which layers rotate, and the window of each."""
    interval = view.integer("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(num_layers)]
    flags = [bool(flag) for flag in view.get("no_rope_layers", default)][:num_layers]
    if len(flags) != num_layers:
        raise view.refuse("no_rope_layers", flags, f"a list of {num_layers} numbers")
    window = view.window(max_position) if view.flag("use_sliding_window", False) else 0
    kinds = ["full_attention" if flag else "sliding_attention" for flag in flags]
    if not window:
        kinds = ["full_attention"] * num_layers
    kinds = view.layer_types(num_layers, kinds)
    return flags, [window if kind == "sliding_attention" else 0 for kind in kinds]
