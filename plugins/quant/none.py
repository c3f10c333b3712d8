"""Weights stored as plain floats: cast to the compute dtype, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cardcage.core.contracts import (
    LinearDesc,
    PluginContext,
    QuantCaps,
    Quantizer,
    QuantNeed,
    QuantTensor,
    TensorMeta,
)
from cardcage.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_FLOATS = ("float32", "float16", "bfloat16", "float64")


class Unquantized:
    """Plain float32, float16 and bfloat16 checkpoints."""

    name = "none"
    api = "quant>=1.0,<2"
    caps = QuantCaps(methods=frozenset({"none"}), priority=50)

    def build(self, need: QuantNeed, ctx: PluginContext, options: Any) -> Quantizer:
        return PlainQuantizer()


class PlainQuantizer:
    """One tensor per weight, `<name>.weight` [N, K]."""

    def slots(self, desc: LinearDesc, index: Mapping[str, TensorMeta]) -> tuple[str, ...]:
        """The weight alone; biases are ordinary parameters."""
        return (f"{desc.name}.weight",)

    def record(
        self,
        desc: LinearDesc,
        tensors: Mapping[str, torch.Tensor],
        index: Mapping[str, TensorMeta],
        dtype: torch.dtype,
    ) -> QuantTensor:
        """The weight in `dtype`: the host tensor itself when it has that dtype already.

        Raises:
            CheckpointError: the tensor holds integers or packed codes.
        """
        name = f"{desc.name}.weight"
        weight = tensors[name]
        if (
            not weight.is_floating_point()
            or str(weight.dtype).removeprefix("torch.") not in _FLOATS
        ):
            raise CheckpointError(
                f"{name} has dtype {weight.dtype} and the checkpoint declares no quantization, "
                f"so it cannot be a weight; expected one of {', '.join(_FLOATS)}"
            )
        return QuantTensor(
            encoding="none",
            shape=(int(weight.shape[0]), int(weight.shape[1])),
            parts={"weight": weight.to(dtype)},
            decode=_decode,
            decode_rows=_decode_rows,
        )


def _decode(record: QuantTensor) -> torch.Tensor:
    return record.parts["weight"].float()


def _decode_rows(record: QuantTensor, ids: torch.Tensor) -> torch.Tensor:
    return record.parts["weight"].index_select(0, ids).float()
