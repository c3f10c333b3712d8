"""The engine: order of stages, failures, aborts in every state, the end."""

from __future__ import annotations

import inspect

import pytest

from cardcage.core.engine import Engine
from cardcage.core.errors import EngineDead, ExecutionError
from cardcage.core.torture_device import fake_stream
from tests.support.core_rig import Rig


def answer(prompt: list[int], count: int) -> list[int]:
    draw = fake_stream(prompt, 0)
    return [draw() for _ in range(count)]


PROMPTS = {name: [index + 1] * 6 for index, name in enumerate("abcd")}


def rig_with(names: str, **numbers: object) -> Rig:
    rig = Rig(**numbers)  # type: ignore[arg-type]
    for name in names:
        rig.add(name, PROMPTS[name], max_tokens=5)
    return rig


def test_step_fits_one_screen() -> None:
    lines = inspect.getsource(Engine.step).splitlines()
    assert len(lines) <= 30
    stages = ["schedule()", "_submit(", "_wait(", ".commit(", "build_outputs("]
    found = [next(i for i, line in enumerate(lines) if s in line) for s in stages]
    assert found == sorted(found)


def test_keeps_steps_in_flight() -> None:
    rig = rig_with("a", in_flight=2)
    rig.step()
    assert len(rig.plans) == 2  # the second was planned while the first ran
    assert len(rig.scheduler.outstanding) == 1
    rig = rig_with("a", in_flight=2, steps_in_flight=1)
    rig.step()
    assert len(rig.plans) == 1


def test_step_without_blocking() -> None:
    rig = rig_with("a")
    assert rig.engine.step(block=False) == []
    rig.clock.now += 10.0
    assert [o.token_ids for o in rig.engine.step(block=False)] == [answer(PROMPTS["a"], 1)]


def test_nothing_to_do() -> None:
    rig = Rig()
    assert not rig.engine.has_work()
    assert rig.engine.step() == []


# ---- aborts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_every_step(steps: int, depth: int) -> None:
    rig = rig_with("ab", in_flight=depth, max_num_batched_tokens=4)
    rig.step(steps)
    done = set(rig.endings())
    rig.engine.abort(["a", "nobody"])
    rig.engine.abort(["a"])
    rig.step()
    assert rig.endings()["a"] == ("length" if "a" in done else "abort")
    rig.engine.abort(["a"])
    rig.run()
    want = answer(PROMPTS["a"], 5)
    got = rig.tokens()["a"]
    assert got == want[: len(got)]
    assert rig.tokens()["b"] == answer(PROMPTS["b"], 5)
    assert rig.scheduler.kv.pool.usage == 0.0
    assert set(rig.endings()) == {"a", "b"}


def test_abort_while_parked_and_while_paused() -> None:
    rig = rig_with("ab")
    rig.scheduler.park("a", "grammar", 100.0)
    rig.engine.pause(all=True)
    rig.engine.abort(["a", "b"])
    assert rig.engine.has_work()  # their endings are undelivered
    rig.step()
    assert rig.endings() == {"a": "abort", "b": "abort"}
    assert not rig.engine.has_work()


def test_pause_all_plans_nothing() -> None:
    rig = rig_with("a")
    rig.step()
    rig.engine.pause(all=True)
    assert rig.step(3) == []
    assert len(rig.plans) == 1
    assert not rig.engine.has_work()
    rig.engine.resume()
    assert rig.run()["a"] == answer(PROMPTS["a"], 5)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["row", "rows"])
def test_failing_row_ends_its_request_alone(mode: str, depth: int, when: int) -> None:
    rig = rig_with("abc", in_flight=depth)
    rig.step(when)
    rig.device.armed.append(mode)
    rig.run()
    (failed,) = [name for name, reason in rig.endings().items() if reason == "error"]
    assert failed in rig.device.blamed
    for name in set("abc") - {failed}:
        assert rig.tokens()[name] == answer(PROMPTS[name], 5)
    (error,) = [o.error for o in rig.outputs if o.error]
    assert error.startswith("torture:")
    assert rig.engine.stats().finished == {"error": 1, "length": 2}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["step", "crash", "submit"])
def test_failing_step_ends_its_requests_and_no_other(mode: str, depth: int) -> None:
    rig = rig_with("ab", in_flight=depth, max_num_seqs=2)
    rig.add("c", PROMPTS["c"], max_tokens=5)
    rig.step(2)
    rig.device.armed.append(mode)
    rig.run()
    endings = rig.endings()
    assert endings["c"] == "length"
    assert rig.tokens()["c"] == answer(PROMPTS["c"], 5)
    assert {endings["a"], endings["b"]} == {"error"}
    assert not rig.device.broken  # it was reset
    assert rig.engine.stats().kv_usage == 0.0


def test_others_in_flight_are_recomputed() -> None:
    """Step N fails with a in it; step N + 1 had b as well: b goes on, from its tokens so far."""
    rig = Rig(in_flight=2, max_num_batched_tokens=4, max_num_seqs=4)
    rig.add("a", PROMPTS["a"][:2], max_tokens=6)
    rig.device.armed.append("step")
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.engine._submit(plan)
    rig.add("b", PROMPTS["b"], max_tokens=5)
    rig.run()
    assert rig.endings() == {"a": "error", "b": "length"}
    assert rig.tokens()["b"] == answer(PROMPTS["b"], 5)


def test_dead_executor_fails_everyone_and_is_told_once() -> None:
    rig = rig_with("abc", max_num_seqs=2)
    rig.step()

    def dies(plan):  # type: ignore[no-untyped-def]
        raise EngineDead("the device fell off the bus")

    rig.device.execute = dies  # type: ignore[method-assign]
    outputs = rig.step()
    assert {o.request_id for o in outputs} == set("abc")
    assert {o.error for o in outputs} == {"the device fell off the bus"}
    assert rig.engine.has_work()  # so that a loop steps once more and hears it
    with pytest.raises(EngineDead, match="fell off"):
        rig.engine.step()
    assert not rig.engine.has_work()
    with pytest.raises(EngineDead, match="the engine is dead"):
        rig.add("d", 3)


def test_failed_reset_is_death() -> None:
    rig = rig_with("a")

    def fails() -> None:
        raise RuntimeError("no")

    rig.device.reset = fails  # type: ignore[method-assign]
    rig.device.armed.append("step")
    outputs = rig.step()
    assert [o.finish_reason.value for o in outputs if o.finish_reason] == ["error"]
    with pytest.raises(EngineDead, match="could not be reset"):
        rig.engine.step()


def test_foreign_exception_is_named() -> None:
    rig = rig_with("a")
    rig.device.armed.append("crash")
    (output,) = rig.step()
    assert output.error == "a step failed: torture: a foreign exception"


def test_fault_on_submit_with_rows_spares_the_others() -> None:
    rig = rig_with("ab")
    execute = rig.device.execute

    def once(plan):  # type: ignore[no-untyped-def]
        rig.device.execute = execute  # type: ignore[method-assign]
        raise ExecutionError("bad row", rows=(1,))

    rig.device.execute = once  # type: ignore[method-assign]
    rig.run()
    assert rig.endings() == {"a": "length", "b": "error"}
    assert rig.tokens()["a"] == answer(PROMPTS["a"], 5)


# ---- the end ------------------------------------------------------------------------------------


def test_close_ends_every_request() -> None:
    rig = rig_with("abc", in_flight=2, max_num_seqs=1)
    rig.step()
    rig.engine.close()
    rig.engine.close()
    rig.step()
    assert rig.endings() == {"a": "abort", "b": "abort", "c": "abort"}
    assert not rig.engine.has_work()
    with pytest.raises(EngineDead, match="closed"):
        rig.add("d", 3)


def test_stats_and_timings() -> None:
    rig = rig_with("ab", max_num_seqs=1)
    rig.step()
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.steps) == (1, 1, 1)
    assert stats.kv_usage > 0
    rig.clock.now += 1.0
    rig.run()
    last = {o.request_id: o for o in rig.outputs}
    assert last["a"].queued_s == 0.0
    assert last["a"].first_token_s is not None
    assert last["b"].queued_s is not None
    assert last["b"].queued_s > 1.0
    assert last["b"].first_token_s is not None
    assert last["b"].first_token_s > last["b"].queued_s
    stats = rig.engine.stats()
    assert stats.generation_tokens == 10
    assert stats.finished == {"length": 2}
