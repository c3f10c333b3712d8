"""Models as data: what a `models` plugin returns and the one interpreter runs.

A model is a tree of named nodes. A node names a block (a `blocks` plugin: the math), its place
in the parameter tree, and its arguments. `describe(config) -> ModelDesc` holds no forward code,
so the same description drives building, weight loading, KV planning and sharding. No torch.

Parameter names inside a description are the names of Hugging Face checkpoints (for example
`model.layers.0.self_attn.q_proj.weight`); a loader of another format maps its own names to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, computed in float32 whatever the model's dtype.

    `dim` channels of each head rotate, the leading ones. `pairing`: "half" pairs (i, i + dim/2),
    "interleaved" pairs (2i, 2i+1). `scaling` is the config's own dictionary (`rope_type`,
    `factor`, ...), {} for none. `max_position` is the model's context.
    """

    dim: int
    theta: float
    pairing: str = "half"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_position: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One block in the tree. `prefix` is where its checkpoint tensors live ("" for none)."""

    block: str
    prefix: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Branch:
    """One residual branch: x + scale * post_norm(op(norm(x))); norms may be absent."""

    op: Node
    norm: Node | None = None
    post_norm: Node | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Branches of one layer, in order; `parallel` feeds all of them the layer's input."""

    branches: tuple[Branch, ...]
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Logits = softcap(scale * W h). `prefix` is the weight's place; tied = the embedding's."""

    prefix: str
    tied: bool
    scale: float = 1.0
    softcap: float = 0.0
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelDesc:
    """A whole decoder as data.

    `embed_scale` multiplies embeddings (Gemma: sqrt(hidden), rounded to the model dtype first
    when `embed_scale_in_dtype`). `ropes` are named; blocks refer to them by name. `drop` are
    regular expressions of checkpoint tensors that are known and unused. `aliases` are
    (regex, replacement) pairs that turn other spellings of checkpoint names into ours.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    embed_prefix: str
    layers: tuple[LayerSpec, ...]
    final_norm: Node | None
    head: HeadSpec
    ropes: Mapping[str, RopeSpec] = field(default_factory=dict)
    embed_scale: float = 1.0
    embed_scale_in_dtype: bool = True
    drop: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
