"""Building single blocks in tests: a context, and loading whatever was asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cardcage.core.contracts import Quantizer, TensorMeta
from cardcage.core.model_desc import HeadSpec, ModelDesc, Node, RopeSpec
from cardcage.core.runtime.layers import BuildContext, ModelInput
from cardcage.core.runtime.model import Model, load_weights
from cardcage.core.runtime.weights import Weight
from tests.support.paged import BLOCK_SIZE, DictSource, PlainQuantizer, facts, resolver


def desc(hidden: int = 16, vocab: int = 11, **changes: Any) -> ModelDesc:
    """A description with no layer, to be changed."""
    fields: dict[str, Any] = {
        "architecture": "Test",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "max_position": 64,
        "embed_prefix": "embed",
        "layers": (),
        "final_norm": None,
        "head": HeadSpec("head", tied=True),
        "ropes": {"rope": RopeSpec(dim=8, theta=10000.0, max_position=64)},
    }
    return ModelDesc(**{**fields, **changes})


def context(
    description: ModelDesc | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> BuildContext:
    """A BuildContext on the host with the test resolver."""
    description = description or desc()
    fields: dict[str, Any] = {
        "dtype": dtype,
        "device": torch.device("cpu"),
        "facts": facts(),
        "resolve": resolver(),
        "block_size": BLOCK_SIZE,
        "kv_format": "auto",
        "max_model_len": description.max_position,
    }
    return BuildContext(description, **{**fields, **options})


def load(ctx: BuildContext, source: Any, quantizer: Quantizer | None = None) -> Model:
    """Load what was asked of a context (and the embedding and head that every model has)."""
    model = Model(ctx, quantizer or PlainQuantizer())
    load_weights(model, source)
    return model


class RandomSource(DictSource):
    """Makes up every tensor that a context asks for, reproducibly."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], std: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(5)
        super().__init__(
            {name: torch.randn(s, generator=generator) * std for name, s in shapes.items()}
        )


def shapes_of(ctx: BuildContext) -> dict[str, tuple[int, ...]]:
    """The names and shapes that the weights of a context want, by their own plan."""
    return wanted_by(ctx.weights)


def wanted_by(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """The names and shapes that some weights want."""
    wanted: dict[str, tuple[int, ...]] = {}
    index = _Anything()
    for weight in weights:
        for item in weight.plan(index, PlainQuantizer()):
            wanted.update(item.shapes)
    return wanted


class _Anything(dict[str, TensorMeta]):
    """An index that has everything, of unknown shape: plans then name what they expect."""

    def get(self, key: str, default: Any = None) -> Any:
        return TensorMeta((), "float32", 0)


def make(node: Node, ctx: BuildContext, std: float = 0.3) -> tuple[Any, DictSource]:
    """A block with random weights, and the source that they came from."""
    block = ctx.make(node)
    shapes = shapes_of(ctx)
    d = ctx.desc
    shapes[f"{d.embed_prefix}.weight"] = (d.vocab_size, d.hidden_size)
    source = RandomSource(shapes, std)
    load(ctx, source)
    if hasattr(block, "finish_loading"):
        block.finish_loading()
    return block, source


def step(ctx: BuildContext, tokens: int) -> ModelInput:
    """An input for blocks without attention: positions 0..tokens-1, RoPE tables made."""
    positions = torch.arange(tokens)
    inp = ModelInput(torch.zeros(tokens, dtype=torch.int64), positions, [])
    inp.ropes = [rope.tables(positions) for rope in ctx.ropes]
    return inp
