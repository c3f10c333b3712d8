"""The null platform."""

from __future__ import annotations

import pytest

from cardcage.core.contracts import HardwareNeed
from cardcage.core.errors import ResourceError
from cardcage.core.registry import Registry


def test_only_by_name_and_without_a_device() -> None:
    registry = Registry.discover()
    decision = registry.explain("hardware", HardwareNeed())
    assert decision.chosen is None or decision.chosen.name != "null"
    platform = registry.build(
        registry.resolve("hardware", HardwareNeed(), use="null"), HardwareNeed(), None
    )
    assert platform.device_type == "null"
    assert platform.facts().total_bytes == platform.memory()[1]
    assert platform.dtypes() == ("float32",)
    assert platform.defaults({}) == {}
    assert platform.constraints({}) == []
    assert platform.candidates("attention") == ()
    assert platform.worker_env() == {}
    with platform.stream():
        platform.event().record()
    platform.synchronize()
    with pytest.raises(ResourceError, match="no device to run a model on"):
        platform.device()
    platform.close()
