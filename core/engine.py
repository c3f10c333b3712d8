"""The engine: requests in, token outputs out, one `step()` at a time.

    schedule -> execute -> (oldest ticket).wait -> commit -> outputs

The engine owns nothing but the order of these stages, the tickets of steps in flight, and what
happens when a step fails: a failing row ends its own request, a failing step the requests in it;
everyone else is recomputed. One thread, no I/O of its own, the clock is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cardcage.core.contracts import Executor, StepTicket
from cardcage.core.errors import EngineDead, ExecutionError
from cardcage.core.outputs import build_outputs, ended_outputs
from cardcage.core.scheduler import Pause, Scheduler
from cardcage.core.types import EngineStats, Request, StepPlan, StepResult, TokenOutput


class Engine:
    """Runs requests on an executor.

    Every accepted request ends with exactly one output that has a `finish_reason`. Args:
        scheduler: decides; the engine is its only user.
        executor: loaded; executes plans in the order given.
        clock: monotonic seconds, the one of `Request.arrival_s`.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float]
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self._clock = clock
        self._depth = max(1, min(executor.max_in_flight, scheduler.config.steps_in_flight))
        self._in_flight: deque[StepTicket] = deque()
        self._dead: EngineDead | None = None
        self._told_dead = False
        self._closed = False

    # ---- requests -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. What can never be served is refused here, with the reason.

        Raises:
            InvalidRequest, ContextTooLong: it can never run.
            AdmissionError: the queue is full; try again later.
            EngineDead: the engine cannot go on, or is closed.
        """
        if self._dead is not None:
            raise EngineDead(f"the engine is dead: {self._dead}") from self._dead
        if self._closed:
            raise EngineDead("the engine is closed")
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Cancel requests: each live one ends with reason "abort" at the next `step`.

        Idempotent and legal in every state; ids that are not live are ignored.
        """
        self.scheduler.abort(request_ids)

    # ---- the step -------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Anything to schedule, in flight, or undelivered (parked requests have deadlines)."""
        undelivered = self.scheduler.has_ended or (self._dead is not None and not self._told_dead)
        return undelivered or bool(self._in_flight) or self.scheduler.has_work()

    def step(self, block: bool = True) -> list[TokenOutput]:
        """Plan and submit steps until enough are in flight, then finish the oldest.

        Args:
            block: wait for the oldest step; False returns [] for it while it still runs.

        Raises:
            EngineDead: the step before this one met it and every request was told.
        """
        self._raise_if_told()
        with self._whole_or_dead():
            while len(self._in_flight) < self._depth:
                plan = self.scheduler.schedule()
                if plan is None or not self._submit(plan):
                    break
            outputs: list[TokenOutput] = []
            if self._in_flight and (block or self._in_flight[0].done()):
                result = self._wait(self._in_flight.popleft())
                if result is not None:
                    committed = self.scheduler.commit(result)
                    outputs = build_outputs(committed, result, self._clock())
            return outputs + ended_outputs(self.scheduler.drain_ended(), self._clock())

    @contextmanager
    def _whole_or_dead(self) -> Iterator[None]:
        """A step that is broken off (Ctrl-C, for one) leaves books that nothing can go on with.

        Failures of the device are handled before and never come here.
        """
        try:
            yield
        except BaseException as error:
            self._dead = EngineDead(f"a step was broken off: {str(error) or type(error).__name__}")
            self._dead.__cause__ = error
            self._told_dead = True
            self._in_flight.clear()
            raise

    def _submit(self, plan: StepPlan) -> bool:
        try:
            if self.scheduler.fatal is not None:
                raise self.scheduler.fatal
            self._in_flight.append(self.executor.execute(plan))
        except Exception as error:
            # Whatever was raised, the device may have applied half of the plan.
            rows = error.rows if isinstance(error, ExecutionError) else None
            self._lose_device(error, rows, newest=True)
            return False
        return True

    def _wait(self, ticket: StepTicket) -> StepResult | None:
        try:
            return ticket.wait()
        except Exception as error:
            if isinstance(error, ExecutionError) and error.rows is not None:
                self.scheduler.fail_step(_sentence(error), error.rows)
            else:
                self._lose_device(error, None, newest=False)
            return None

    # ---- failure --------------------------------------------------------------------------------

    def _lose_device(self, error: Exception, rows: tuple[int, ...] | None, newest: bool) -> None:
        """Fail the step's requests (or its `rows`), reset the executor, recompute the others."""
        if isinstance(error, EngineDead):
            self._die(error)
            return
        self.scheduler.fail_step(_sentence(error), rows, newest)
        self._in_flight.clear()
        self.scheduler.forget_device()
        try:
            self.executor.reset()
        except Exception as cause:
            dead = EngineDead(f"the executor could not be reset after a failed step: {cause}")
            dead.__cause__ = cause
            self._die(dead)

    def _die(self, error: EngineDead) -> None:
        """Every live request fails with the cause; the next `step` raises it."""
        self._dead = error
        self._in_flight.clear()
        self.scheduler.forget_device()
        for request_id in list(self.scheduler.states):
            self.scheduler.fail(request_id, _sentence(error))

    def _raise_if_told(self) -> None:
        if self._dead is not None and not self.scheduler.has_ended:
            self._told_dead = True
            raise self._dead

    # ---- control --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return self.scheduler.stats()

    def pause(self, all: bool = False) -> None:
        """Start no more requests; with `all`, plan no more steps at all. Aborts still work."""
        self.scheduler.pause = Pause.ALL if all else Pause.ADMISSION

    def resume(self) -> None:
        """Undo `pause`."""
        self.scheduler.pause = Pause.NONE

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while any request runs."""
        return self.scheduler.kv.pool.reset()

    def close(self) -> None:
        """Abort what is live and close the executor. `step` then only hands out the endings."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.clear()
        self.scheduler.forget_device()
        self.scheduler.abort(list(self.scheduler.states))
        self.executor.close()


def _sentence(error: Exception) -> str:
    """What a client reads: our own exceptions explain themselves, others need their name."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, ExecutionError) else f"a step failed: {text}"
