"""Random weights for any config: `dummy:path/config.json`, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import Loader, LoaderCaps, LoaderNeed, PluginContext, RefMatch

PREFIX = "dummy:"


class DummyOptions(BaseModel):
    """Equal seeds give equal weights on every device."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: int = Field(1234, ge=0, lt=2**32, description="seed of all weights")


class Dummy:
    """Makes weights up for a config.json, or for a folder that holds one."""

    name = "dummy"
    api = "loaders>=1.0,<2"
    caps = LoaderCaps(priority=30)
    options = DummyOptions

    def recognise(self, ref: str) -> RefMatch | None:
        """Anything that starts with `dummy:`."""
        return RefMatch(100, "starts with dummy:") if ref.startswith(PREFIX) else None

    def build(self, need: LoaderNeed, ctx: PluginContext, options: Any) -> Loader:
        from cardcage.plugins.loaders.dummy.source import DummyLoader

        return DummyLoader((options or DummyOptions()).seed)
