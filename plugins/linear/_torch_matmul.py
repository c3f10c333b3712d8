"""The kernel of `torch_matmul`: holds the weight as it is, asks torch for the product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cardcage.core.contracts import QuantTensor


class MatmulKernel:
    """Handle: the weight [N, K] on the device, contiguous, in the compute dtype."""

    layout_id = "dense"

    def prepare(self, record: QuantTensor, device: torch.device) -> torch.Tensor:
        """The record's weight itself where it is already there (tied weights share storage)."""
        return record.parts["weight"].to(device).contiguous()

    def run(
        self, handle: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, handle, bias)
