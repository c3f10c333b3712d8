"""Random tensors from a counter-based hash, made where they are used.

Value i of tensor t is uniform in +-a, from a 32-bit integer hash of (seed, t's name, i). The
same integers come out on every device, so a model of a seed is one model everywhere, and a
shard of a tensor can be made without the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from cardcage.core.contracts import TensorMeta
from cardcage.core.errors import CheckpointError

_HOST_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 27
_VECTOR_SIZE = 0.02


class DummyWeights:
    """A `WeightSource` that makes up every tensor it was told to expect.

    It does not know which tensors a model has: `expect` tells it, before `index` is asked. It
    also names the device, so that a large model's weights are made there at memory speed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._device = torch.device("cpu")
        self._dtype = torch.float32

    def expect(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """What the model will read: names and shapes, where to make them and in which dtype."""
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._device = device or self._device
        self._dtype = dtype or self._dtype

    def index(self) -> Mapping[str, TensorMeta]:
        """Everything that was announced to `expect`."""
        kind = str(self._dtype).removeprefix("torch.")
        return {
            name: TensorMeta(shape, kind, math.prod(shape) * self._dtype.itemsize)
            for name, shape in self._shapes.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name, made new in each call, on the device given to `expect`.

        Raises:
            CheckpointError: the name was not announced.
        """
        if name not in self._shapes:
            raise CheckpointError(f"dummy weights: tensor {name} was not announced by expect()")
        out = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        fill(out, self.seed, name)
        return out

    def close(self) -> None:
        """Nothing to release."""


def fill(out: torch.Tensor, seed: int, name: str) -> None:
    """Write a tensor's values in place.

    Norm weights are 1, so activations keep their size. A matrix [..., K] is uniform with
    variance 1/K, other vectors (biases) are uniform in +-0.02.

    Args:
        out: contiguous, any floating dtype and device.
        seed: of the whole model.
        name: the tensor's checkpoint name.
    """
    if out.dim() < 2 and name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    size = math.sqrt(3.0 / out.shape[-1]) if out.dim() > 1 else _VECTOR_SIZE
    key = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    flat = out.view(-1)
    chunk = _HOST_CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        bits = hashed(start, stop, int.from_bytes(key[:8], "little"), out.device)
        flat[start:stop] = bits.float().mul_(size * 2.0**-31)


def hashed(start: int, stop: int, key: int, device: torch.device) -> torch.Tensor:
    """int32 [stop - start] of well mixed bits for the counters start .. stop - 1.

    Two rounds of multiply and xor-shift on 32-bit lanes (constants of xxHash32); int32 products
    wrap in torch. Counters beyond 2^32 go into the key.
    """
    high = _signed((key >> 32) ^ (start >> 32) * 0x9E3779B1)
    x = torch.arange(_signed(start), _signed(start) + stop - start, device=device)
    x = x.to(torch.int32).mul_(_signed(0x9E3779B1)).add_(_signed(key))
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        x.bitwise_xor_((x >> shift) & (0x7FFFFFFF >> (shift - 1)))
        x.mul_(_signed(factor))
        x.bitwise_xor_(high)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low
