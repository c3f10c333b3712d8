"""The `null` platform in use: every query has an answer, no query reaches a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from cardcage.core.contracts import Default, DeviceFacts, Violation
from cardcage.core.errors import ResourceError
from cardcage.plugins.hardware import _host

if TYPE_CHECKING:
    import torch

_PRETENDED_BYTES = _host.GIB


class NullPlatform:
    """A platform without a device; memory is a made-up number, so that sizing has an input."""

    name = "null"
    device_type = "null"

    def device(self) -> torch.device:
        """torch has no such device.

        Raises:
            ResourceError: always.
        """
        return _refuse()

    def facts(self) -> DeviceFacts:
        """1 GiB of pretended memory and nothing else."""
        size = _PRETENDED_BYTES
        return DeviceFacts("null", "null", (), size, size, 0, frozenset())

    def memory(self) -> tuple[int, int]:
        """1 GiB free of 1 GiB, made up."""
        return _PRETENDED_BYTES, _PRETENDED_BYTES

    def dtypes(self) -> tuple[str, ...]:
        """float32 alone."""
        return ("float32",)

    def synchronize(self) -> None:
        """Nothing runs."""

    def event(self) -> Any:
        """An event that is always complete."""
        return _host.NoEvent()

    def stream(self) -> Any:
        """A context manager that changes nothing."""
        return _host.NoStream()

    def candidates(self, kind: str) -> tuple[str, ...]:
        """No preference."""
        return ()

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Default]:
        """No proposals."""
        return {}

    def constraints(self, config: Mapping[str, Any]) -> list[Violation]:
        """No demands."""
        return []

    def worker_env(self) -> dict[str, str]:
        """Nothing to set."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


def _refuse() -> NoReturn:
    raise ResourceError(
        'the null platform has no device to run a model on; set hardware.use = "cpu" or an '
        "accelerator"
    )
