"""The gated MLP's implementation: one fused product for gate and up, one for down.

  [g | u] = W_gate_up x (+ b);  y = W_down (act(g) * u) (+ b)

Source: Shazeer 2020 (GLU variants).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from cardcage.core.errors import UnsupportedModel
from cardcage.core.model_desc import Node
from cardcage.core.runtime.layers import BuildContext, ModelInput
from cardcage.plugins.blocks._args import refuse_rest


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
}


def gated(
    ctx: BuildContext, name: str, size: int, who: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function [T, 2 I] -> [T, I] that applies `name` to the gate and multiplies with up.

    Raises:
        UnsupportedModel: the activation is not known.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{who}: activation {name!r} is none of {', '.join(ACTIVATIONS)}")
    if ctx.triton:
        from cardcage.plugins.blocks import _kernels

        return lambda both: _kernels.gated(both, name)
    act = ACTIVATIONS[name]

    def run(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.split(size, 1)
        return act(gate).mul_(up)

    return run


class GatedMlp:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, node: Node, ctx: BuildContext) -> None:
        args = dict(node.args)
        size = args.pop("intermediate_size")
        act = args.pop("activation", "swiglu")
        bias = args.pop("bias", False)
        fused = args.pop("fused", False)
        refuse_rest("mlp", args)
        hidden, prefix = ctx.desc.hidden_size, node.prefix
        if fused:
            self._gate_up = ctx.linear(f"{prefix}.gate_up_proj", hidden, 2 * size, bias)
        else:
            parts = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
            self._gate_up = ctx.linear(parts, hidden, (size, size), bias)
        self._down = ctx.linear(f"{prefix}.down_proj", size, hidden, bias)
        self._gated = gated(ctx, act, size, prefix)

    def __call__(self, x: torch.Tensor, inp: ModelInput) -> torch.Tensor:
        return self._down(self._gated(self._gate_up(x)))
