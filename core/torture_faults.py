"""Ten faults to plant in the engine, each a mistake that engines have shipped.

`plant(name, engine)` patches one engine object; nothing else changes. The torture test must find
each within 50 seeds. Used by `cardcage torture --plant` and by the tests of the checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from cardcage.core.engine import Engine
from cardcage.core.request_state import RequestState
from cardcage.core.types import RequestStatus

FAULTS: dict[str, Callable[[Engine], None]] = {}


def plant(name: str, engine: Engine) -> None:
    """Break `engine` in the way that `name` says. Raises KeyError for unknown names."""
    FAULTS[name](engine)


def _fault(function: Callable[[Engine], None]) -> Callable[[Engine], None]:
    FAULTS[function.__name__] = function
    return function


def _patch(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


@_fault
def leaked_block(engine: Engine) -> None:
    """Every seventh release forgets its last block."""
    turn = itertools.count(1)

    def make(free: Any) -> Callable[..., Any]:
        return lambda group, ids: free(group, ids if next(turn) % 7 else ids[:-1])

    _patch(engine.scheduler.kv.pool, "free", make)


@_fault
def double_free(engine: Engine) -> None:
    """A preempted request's first block is released twice."""

    def make(requeue: Any) -> Callable[..., Any]:
        def broken(state: RequestState) -> None:
            first = state.block_ids[0][:1]
            requeue(state)
            engine.scheduler.kv.pool.free(0, first)

        return broken

    _patch(engine.scheduler, "_requeue", make)


@_fault
def stale_ticket(engine: Engine) -> None:
    """All tenants of a slot have the same epoch: results of the last one reach the next."""

    def make(seat: Any) -> Callable[..., Any]:
        def broken(state: RequestState, hit: int, now: float) -> None:
            seat(state, hit, now)
            engine.scheduler.table.epoch[state.slot] = 1

        return broken

    _patch(engine.scheduler, "_seat", make)


@_fault
def lost_wakeup(engine: Engine) -> None:
    """Every second event takes its request out of the parked ones and tells nobody."""
    turn = itertools.count(1)

    def make(wake: Any) -> Callable[..., Any]:
        def broken(request_id: str) -> bool:
            if next(turn) % 2:
                return bool(wake(request_id))
            return engine.scheduler.parked.pop(request_id, None) is not None

        return broken

    _patch(engine.scheduler, "wake", make)


@_fault
def wrong_prefix_key(engine: Engine) -> None:
    """A block's key covers its own tokens and not those before it."""

    def make(extend: Any) -> Callable[..., Any]:
        def broken(state: RequestState, num_tokens: int) -> None:
            unit = engine.scheduler.kv.unit
            for index in range(len(state.prefix_keys), num_tokens // unit):
                block = state.tokens[index * unit : (index + 1) * unit]
                state.prefix_keys.append(bytes(block))

        return broken

    _patch(engine.scheduler.kv, "_extend", make)


@_fault
def starving_queue(engine: Engine) -> None:
    """The newest request starts first."""

    def make(may_admit: Any) -> Callable[..., Any]:
        def broken() -> bool:
            engine.scheduler.waiting.sort(key=lambda state: state.key, reverse=True)
            return bool(may_admit())

        return broken

    def find(remove: Any) -> Callable[..., Any]:
        def broken(state: RequestState) -> None:
            engine.scheduler.waiting.sort(key=lambda other: other.key)
            remove(state)

        return broken

    _patch(engine.scheduler, "_may_admit", make)
    _patch(engine.scheduler, "_remove", find)


@_fault
def late_window_free(engine: Engine) -> None:
    """Blocks left of a window are kept until the request ends."""
    _patch(engine.scheduler.kv, "_release_left_behind", lambda old: lambda state, confirmed: None)


@_fault
def budget_overrun(engine: Engine) -> None:
    """What sharing left over is handed out twice."""
    scheduler = engine.scheduler

    def make(top_up: Any) -> Callable[..., Any]:
        def broken(draft: Any) -> None:
            draft.budget += max(1, draft.budget // 2)
            top_up(draft)

        return broken

    _patch(scheduler, "_top_up", make)


@_fault
def lost_abort(engine: Engine) -> None:
    """Aborts of requests that wait or are parked are forgotten."""
    scheduler = engine.scheduler

    def make(abort: Any) -> Callable[..., Any]:
        def broken(request_ids: Any) -> None:
            running = RequestStatus.RUNNING
            abort(
                [
                    i
                    for i in request_ids
                    if i in scheduler.states and scheduler.states[i].status is running
                ]
            )

        return broken

    _patch(scheduler, "abort", make)


@_fault
def duplicate_terminal(engine: Engine) -> None:
    """A request whose last token arrives after a preemption ends twice."""
    scheduler = engine.scheduler

    def make(commit: Any) -> Callable[..., Any]:
        def broken(result: Any) -> Any:
            committed = commit(result)
            for state, _, _ in committed:
                if state.finish_reason is not None and state.num_preemptions:
                    scheduler._ended.append(state)
            return committed

        return broken

    _patch(scheduler, "commit", make)
