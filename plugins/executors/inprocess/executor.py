"""The in-process executor: loads a model on one device and runs step plans on it.

`load` builds everything through `ctx.resolve`; `execute` prepares a plan on the caller's thread
and launches it. On an accelerator the launch returns at once and the ticket waits for an event.
On a host with one step in flight the step runs inside `execute`; with two, a thread runs it
while the caller plans the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from cardcage.core.contracts import Hardware, ModelSource, PluginContext
from cardcage.core.errors import EngineDead, EngineError, ExecutionError
from cardcage.core.runtime.model_runner import ModelRunner, StepHandle
from cardcage.core.types import KVCapacity, StepPlan, StepResult

from .loading import Loaded, load_model

Progress = Callable[[str, int, int], None]


class Ticket:
    """A step in flight: a launched handle, or the promise of one."""

    def __init__(self, step: int, handle: Future[StepHandle]) -> None:
        self._step = step
        self._handle = handle

    def done(self) -> bool:
        """True when `wait` would not block."""
        if not self._handle.done():
            return False
        return self._handle.exception() is not None or self._handle.result().done()

    def wait(self) -> StepResult:
        """The step's result. Raises ExecutionError with the cause if the step failed."""
        try:
            return self._handle.result().result()
        except Exception as error:
            raise failure(self._step, error) from error


def failure(step: int, error: Exception) -> EngineError:
    """What a failed step is reported as: the cause in words, and whether the engine can go on."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return ExecutionError(
            f"step {step} ran out of device memory; lower kv.utilization (or kv.bytes), "
            f"scheduler.max_num_batched_tokens or scheduler.max_num_seqs ({error})"
        )
    if isinstance(error, torch.AcceleratorError):
        # The device context is lost with such an error: nothing later can succeed.
        return EngineDead(f"step {step} failed on the device: {error}")
    return ExecutionError(f"step {step} failed: {type(error).__name__}: {error}")


class InProcessExecutor:
    """One model on one device. Not thread-safe: one caller plans, executes and waits."""

    def __init__(self, ctx: PluginContext) -> None:
        if ctx.hardware is None or ctx.resolve is None:
            raise EngineError("the inprocess executor needs a platform and a resolver")
        self._ctx = ctx
        self._hardware: Hardware = ctx.hardware
        self.max_in_flight = int(ctx.config.get("scheduler", {}).get("steps_in_flight", 1))
        self._loaded: Loaded | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[StepHandle] | None = None
        self._broken = False

    def load(self, source: ModelSource, progress: Progress | None = None) -> KVCapacity:
        """Describe, build, read weights, size the pool, warm up.

        Raises:
            UnsupportedModel, CheckpointError, SelectionError: the model cannot run here.
            ConfigError: dtype or max_model_len do not suit the model or the platform.
            ResourceError: the pool cannot hold one request; says what would fit.
        """
        if self._loaded is not None:
            raise EngineError("this executor holds a model already; close it first")
        try:
            self._loaded = load_model(self._ctx, source, self.max_in_flight, progress)
        except torch.OutOfMemoryError as error:
            raise failure(0, error) from error
        if self._hardware.device_type == "cpu" and self.max_in_flight > 1:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cardcage-step")
        return self._loaded.capacity

    def execute(self, plan: StepPlan) -> Ticket:
        """Launch a step. Errors of any kind come out of the ticket."""
        handle: Future[StepHandle] = Future()
        try:
            if self._broken:
                raise ExecutionError("an earlier step failed; reset() the executor first")
            runner = self._runner()
            prepared = runner.prepare(plan)
            if self._thread is not None:
                handle = self._thread.submit(self._run, prepared)
            else:
                handle.set_result(self._run(prepared))
        except Exception as error:
            self._broken = True
            handle.set_exception(error)
        self._last = handle
        return Ticket(plan.step, handle)

    def _run(self, prepared: Any) -> StepHandle:
        if self._broken:
            raise ExecutionError("an earlier step failed; this one did not run")
        try:
            return self._runner().run(prepared)
        except Exception:
            self._broken = True
            raise

    def _runner(self) -> ModelRunner:
        if self._loaded is None:
            raise ExecutionError("no model is loaded")
        return self._loaded.runner

    def reset(self) -> None:
        """Forget all slots after a failed step; weights and pool stay."""
        if self._last is not None:
            self._last.exception()  # waits for the thread; steps run in order
            self._last = None
        self._broken = False
        if self._loaded is not None:
            self._loaded.runner.reset()

    def explain(self) -> dict[str, Any]:
        """What was chosen inside, JSON-able; empty before `load`."""
        if self._loaded is None:
            return {}
        how = "inside execute()"
        if self._hardware.device_type != "cpu":
            how = "asynchronously on the device"
        elif self._thread is not None:
            how = "on a thread beside the planner"
        return {
            **self._loaded.report,
            "steps_in_flight": self.max_in_flight,
            "steps_run": how,
            "graphs": self._loaded.graphs_report(),
        }

    def close(self) -> None:
        """Wait for what runs, then free model, pool and thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = self._last = None
            # The pool is most of the device: a cycle anywhere above must not keep it.
            gc.collect()
            if self._hardware.device_type != "cpu":
                self._hardware.synchronize()
                torch.accelerator.empty_cache()
