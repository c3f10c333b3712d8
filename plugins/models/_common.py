"""What model descriptions share: reading a Hugging Face config, RoPE settings, plain layers.

A `ConfigView` hands out values and remembers which keys were asked for; `finish` refuses keys
that would change the computation and that nobody honoured. Data only, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Branch, HeadSpec, LayerSpec, ModelDesc, Node, RopeSpec

_MISSING: Any = object()

# Config keys that change what a model computes, with the values that mean "off". A family that
# honours one reads it; for all others any other value is refused.
_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": (),
    "qk_layernorm": (False,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "vision_config": (),
}

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu": "geglu",
}

# rope_type -> the keys that it may hold besides rope_type, rope_theta and partial_rotary_factor
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
}


_MOST = {"num_hidden_layers": 65536}  # far above any model, before anything is allocated
_LARGEST = 1e38  # of a number: what float32 holds


class ConfigView:
    """A config dictionary under reading. A null value counts as absent."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._config = config
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value, or the default. Raises UnsupportedModel if neither exists."""
        self._seen.add(key)
        value = self._config.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise UnsupportedModel(f"{self.architecture}: config has no {key!r}, which is needed")
        return default

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer (zero is allowed where it is the default)."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value <= 0 != default):
            raise self.refuse(key, value, "a positive integer")
        most = _MOST.get(key, 2**31 - 1)
        if value > most:
            raise self.refuse(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(key, value, "a number")
        if not abs(value) <= _LARGEST:  # not finite, or an integer without a float
            raise self.refuse(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def refuse(self, key: str, value: Any, allowed: str) -> UnsupportedModel:
        """The exception for a value that cannot be honoured; the caller raises it."""
        return UnsupportedModel(
            f"{self.architecture}: config key {key!r} is {value!r:.80}, supported is {allowed}"
        )

    def nullable(self, key: str, default: float) -> float | None:
        """A number; None where the config says null, the default where it says nothing."""
        if key in self._config and self._config[key] is None:
            self._seen.add(key)
            return None
        return self.number(key, default)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """The mlp block's name of the config's activation."""
        value = self.get(key, default)
        if value not in _ACTIVATIONS:
            raise self.refuse(key, value, ", ".join(sorted(_ACTIVATIONS)))
        return _ACTIVATIONS[value]

    def window(self, max_position: int, default: int = 0) -> int:
        """Visible keys of a sliding layer; 0 where the window never bites."""
        key = "sliding_window"
        value = 0 if key in self._config and self._config[key] is None else self.get(key, default)
        self._seen.add(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, value, "a positive integer or null")
        return 0 if value >= max_position else value

    def layer_types(self, num_layers: int, default: Sequence[str]) -> list[str]:
        """One of full_attention, sliding_attention per layer."""
        value = list(self.get("layer_types", default))
        if len(value) != num_layers or set(value) - {"full_attention", "sliding_attention"}:
            raise self.refuse(
                "layer_types", value, f"{num_layers} of full_attention, sliding_attention"
            )
        return value

    def finish(self) -> None:
        """Refuse keys that change the computation and were not read."""
        for key, off in _OFF.items():
            value = self._config.get(key)
            if key in self._seen or value is None or value in off:
                continue
            raise self.refuse(key, value, "only " + (" or ".join(map(repr, (None, *off)))))


def rope(
    view: ConfigView,
    head_size: int,
    max_position: int,
    default_theta: float = 10_000.0,
    layer_type: str | None = None,
    legacy_longrope: bool = False,
) -> RopeSpec:
    """The RoPE of a config, from `rope_parameters` (transformers 5) or `rope_scaling`.

    `layer_type` picks an entry where the parameters are nested by layer type.
    `legacy_longrope`: early Phi-3 configs say "yarn" where they mean LongRoPE.
    """
    key = "rope_parameters" if view.get("rope_parameters", None) else "rope_scaling"
    params = _table(view, key, view.get(key, None))
    if layer_type in params:
        params = _table(view, f"{key}.{layer_type}", params[layer_type])
        key = f"{key}.{layer_type}"
    if legacy_longrope and params.get("rope_type", params.get("type")) == "yarn":
        params["rope_type"] = "longrope"
    theta = params.pop("rope_theta", None) or view.number("rope_theta", default_theta)
    if not _is_number(theta) or not 0 < theta <= _LARGEST:
        raise view.refuse("rope_theta", theta, "a positive number")
    partial = params.pop("partial_rotary_factor", None)
    partial = view.number("partial_rotary_factor", 1.0) if partial is None else partial
    if not _is_number(partial) or not 0 < partial <= 1:
        raise view.refuse("partial_rotary_factor", partial, "a number in (0, 1]")
    return rope_spec(view, key, params, float(theta), int(head_size * partial), max_position)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table(view: ConfigView, key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise view.refuse(key, value, "an object")
    return dict(value)


def rope_spec(
    view: ConfigView, key: str, params: Mapping[str, Any], theta: float, dim: int, max_position: int
) -> RopeSpec:
    """A RopeSpec from one flat dictionary of rope parameters found at config key `key`."""
    params = {name: value for name, value in params.items() if value is not None}
    legacy = params.pop("type", "default")
    kind = params.pop("rope_type", legacy)
    kind = "longrope" if kind == "su" else kind
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise view.refuse(f"{key}.rope_type", kind, ", ".join(sorted(_ROPE_KEYS)))
    nested = [name for name, value in params.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(
            f"{view.architecture}: config key {key} has an entry per layer type ({nested[0]!r}), "
            "which this architecture does not define"
        )
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta, max_position=max_position)
    unknown = sorted(params.keys() - _ROPE_KEYS[kind])
    if unknown:
        raise UnsupportedModel(
            f"{view.architecture}: config key {key}.{unknown[0]} is not supported with "
            f"rope_type {kind!r}; supported are {', '.join(sorted(_ROPE_KEYS[kind]))}"
        )
    if "original_max_position_embeddings" in _ROPE_KEYS[kind]:
        # Phi-3 keeps it beside the rope settings, and that value wins.
        outer = view.get("original_max_position_embeddings", None)
        inner = params.get("original_max_position_embeddings", max_position)
        params["original_max_position_embeddings"] = outer or inner
    return RopeSpec(
        dim=dim, theta=theta, scaling={"rope_type": kind, **params}, max_position=max_position
    )


def decoder(
    view: ConfigView,
    layers: Sequence[LayerSpec],
    ropes: Mapping[str, RopeSpec],
    *,
    final_norm: Node,
    max_position: int,
    tied: bool,
    softcap: float = 0.0,
    embed_scale: float = 1.0,
    aliases: tuple[tuple[str, str], ...] = (),
) -> ModelDesc:
    """The parts around the layers, which all these families share."""
    desc = ModelDesc(
        architecture=view.architecture,
        vocab_size=view.integer("vocab_size"),
        hidden_size=view.integer("hidden_size"),
        max_position=max_position,
        embed_prefix="model.embed_tokens",
        layers=tuple(layers),
        final_norm=final_norm,
        head=HeadSpec("lm_head", view.flag("tie_word_embeddings", tied), softcap=softcap),
        ropes=dict(ropes),
        embed_scale=embed_scale,
        aliases=aliases,
    )
    view.finish()
    return desc


def pre_norm_layer(prefix: str, norm: Mapping[str, Any], attention: Node, ffn: Node) -> LayerSpec:
    """x += attention(norm x); x += ffn(norm x), with Llama's names for the norms."""
    return LayerSpec(
        (
            Branch(attention, Node("rms", f"{prefix}.input_layernorm", norm)),
            Branch(ffn, Node("rms", f"{prefix}.post_attention_layernorm", norm)),
        )
    )


def sandwich_layer(prefix: str, norm: Mapping[str, Any], attention: Node, mlp: Node) -> LayerSpec:
    """x += norm(attention(norm x)); x += norm(mlp(norm x)), with Gemma's names for the norms."""

    def node(name: str) -> Node:
        return Node("rms", f"{prefix}.{name}", norm)

    return LayerSpec(
        (
            Branch(attention, node("input_layernorm"), node("post_attention_layernorm")),
            Branch(mlp, node("pre_feedforward_layernorm"), node("post_feedforward_layernorm")),
        )
    )


def qwen_windows(view: ConfigView, num_layers: int, max_position: int) -> list[int]:
    """The window of each layer: with `use_sliding_window`, those from `max_window_layers` up."""
    window = view.window(max_position, 4096) if view.flag("use_sliding_window", False) else 0
    first = view.get("max_window_layers", 28)
    default = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(num_layers)
    ]
    kinds = view.layer_types(num_layers, default)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def heads(view: ConfigView, default_size: int | None = None) -> dict[str, Any]:
    """num_heads, num_kv_heads and head_size of a config, as arguments of the gqa block.

    A config without `head_dim` gets `default_size`, or hidden size / heads if that is None.
    """
    num_heads = view.integer("num_attention_heads")
    num_kv_heads = view.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise view.refuse("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads}")
    size = default_size or view.integer("hidden_size") // num_heads
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": view.integer("head_dim", size),
    }
