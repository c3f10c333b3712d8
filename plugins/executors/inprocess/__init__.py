"""Declaration of the in-process executor: the model runs in the engine's own process."""

from __future__ import annotations

from typing import Any, ClassVar

from cardcage.core.contracts import Executor, ExecutorCaps, ExecutorNeed, PluginContext


class InProcess:
    """Runs steps in the engine's process, on one device, with up to two steps in flight."""

    name: ClassVar[str] = "inprocess"
    api: ClassVar[str] = "executors>=1.0,<2"
    caps: ClassVar[ExecutorCaps] = ExecutorCaps(
        device_type=frozenset({"cpu", "cuda", "xpu"}),
        features=frozenset({"drafts"}),
        priority=50,
    )
    options: ClassVar[None] = None

    def build(self, need: ExecutorNeed, ctx: PluginContext, options: Any) -> Executor:
        """The executor, unloaded. torch is imported here."""
        from .executor import InProcessExecutor

        return InProcessExecutor(ctx)
