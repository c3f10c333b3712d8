"""Host <-> device transfers of a step: one packed upload, one asynchronous download.

Host memory is used as it is when the device is the host. Elsewhere an upload goes through a
ring of pinned buffers (a buffer is rewritten only after its copy has run) and a download runs
on a side stream that waits for the step, so the next step's kernels do not queue behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_ALIGN = 16


class Uploader:
    """Packs small arrays into one pinned buffer and copies them to the device in one go.

    `depth` buffers rotate: at least the number of steps in flight plus one, so that a step
    never waits for an earlier one's copy.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._host: list[torch.Tensor] = []
        self._events: list[torch.Event | None] = []
        self._next = 0
        if device.type != "cpu":
            self._host = [_pinned(1 << 16) for _ in range(depth)]
            self._events = [None] * depth

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Device tensors of the same names, shapes and dtypes (int32, int64 or float32)."""
        if not self._host:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, end = [], 0
        for array in arrays.values():
            offsets.append(end)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        at = self._next
        self._next = (at + 1) % len(self._host)
        event = self._events[at]
        if event is not None:
            event.synchronize()
        if end > self._host[at].numel():
            self._host[at] = _pinned(1 << (end - 1).bit_length())
        buffer = self._host[at]
        flat = buffer.numpy()
        for array, offset in zip(arrays.values(), offsets):
            flat[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        on_device = buffer[:end].to(self.device, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        self._events[at] = event
        out = {}
        for (name, array), offset in zip(arrays.items(), offsets):
            part = on_device[offset : offset + array.nbytes].view(_DTYPES[array.dtype])
            out[name] = part.view(array.shape)
        return out


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Download:
    """Tensors on their way to the host. Holds the device tensors until they have arrived."""

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.Stream | None) -> None:
        self._event: torch.Event | None = None
        self._source = list(tensors)
        if stream is None:
            self._host = self._source
            return
        device = stream.device
        done = torch.Event(device)
        done.record()
        stream.wait_event(done)
        with stream:
            self._host = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in self._source
            ]
            self._event = torch.Event(device)
            self._event.record(stream)

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[Array]:
        """The tensors as numpy arrays; blocks until they are on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        self._source = []
        return [t.numpy() for t in self._host]
