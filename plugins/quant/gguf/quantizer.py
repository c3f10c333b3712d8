"""Records for GGUF tensors: the packed rows as they lie in the file, decoded on demand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cardcage.core.contracts import LinearDesc, QuantTensor, TensorMeta
from cardcage.core.errors import CheckpointError
from cardcage.plugins.quant.gguf.codecs import CODECS, decode_packed


class GgufQuantizer:
    """One tensor per weight, packed or plain; a file mixes both."""

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
        """Packed rows unchanged (part "packed", uint8 [N, row bytes]); plain floats in `dtype`.

        Raises:
            CheckpointError: an encoding without a decoder, or bytes that do not fit the shape.
        """
        name = f"{desc.name}.weight"
        tensor, meta = tensors[name], index[name]
        if meta.encoding == "none":
            n, k = (int(s) for s in tensor.shape)
            return QuantTensor(
                "none", (n, k), {"weight": tensor.to(dtype)}, _plain_decode, _plain_rows
            )
        codec = CODECS.get(meta.encoding)
        if codec is None:
            raise CheckpointError(
                f"{name} is stored as {meta.encoding!r}, which has no decoder here; known: "
                f"{', '.join(sorted(CODECS))}"
            )
        n, k = meta.shape
        row_bytes = k // codec.elems * codec.nbytes
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (n, row_bytes):
            raise CheckpointError(
                f"{name}: {meta.encoding} of shape [{n}, {k}] needs uint8 [{n}, {row_bytes}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        return QuantTensor(meta.encoding, (n, k), {"packed": tensor}, _decode, _decode_rows)


def _plain_decode(record: QuantTensor) -> torch.Tensor:
    return record.parts["weight"].float()


def _plain_rows(record: QuantTensor, ids: torch.Tensor) -> torch.Tensor:
    return record.parts["weight"].index_select(0, ids).float()


def _decode(record: QuantTensor) -> torch.Tensor:
    return decode_packed(record.encoding, record.parts["packed"])


def _decode_rows(record: QuantTensor, ids: torch.Tensor) -> torch.Tensor:
    return decode_packed(record.encoding, record.parts["packed"].index_select(0, ids))
