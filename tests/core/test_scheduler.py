"""The scheduler: budgets, order, admission, preemption, tickets, parking."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardcage.core.errors import AdmissionError, ConfigError, ContextTooLong, InvalidRequest
from cardcage.core.scheduler import Pause, SchedulerConfig
from cardcage.core.torture_device import fake_stream
from cardcage.core.types import KVGroupSpec, RequestStatus
from tests.support.core_rig import FULL, Rig

WINDOW = KVGroupSpec("w", "window", 4, 64, {"window": 6})


def answer(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    draw = fake_stream(prompt, seed)
    return [draw() for _ in range(count)]


# ---- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be >= 1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
        ({"policy": "lifo"}, "policy must be fcfs or priority"),
        ({"backfill": -1}, "backfill must be >= 0"),
    ],
)
def test_config_says_what_is_wrong(numbers: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**numbers)


# ---- plans --------------------------------------------------------------------------------------


def test_prompt_is_chunked_to_the_budget_and_then_decoded() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 19, max_tokens=3)
    assert rig.run()["a"] == answer(list(range(1, 20)), 3)
    assert [p.num_tokens.tolist() for p in rig.plans] == [[8], [8], [3], [1], [1]]
    assert [p.samples.tolist() for p in rig.plans] == [[False], [False], [True], [True], [True]]
    assert [p.starts.tolist() for p in rig.plans] == [[0], [8], [16], [19], [20]]


def test_decode_rows_come_first_and_long_prompts_do_not_stall_them() -> None:
    rig = Rig(max_num_batched_tokens=8, max_model_len=128, blocks=128)
    rig.add("short", 2, max_tokens=30)
    rig.step()
    rig.add("long", 100, max_tokens=2)
    gaps = [len([o for o in rig.step() if o.request_id == "short"]) for _ in range(14)]
    assert gaps == [1] * 14  # one token in every step while the prompt is computed
    for plan in rig.plans:
        assert plan.total_tokens <= 8
        single = (plan.num_tokens == 1).tolist()
        assert single == sorted(single, reverse=True)


def test_long_prefills_share_a_step_and_leftovers_are_used() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("a", 30, max_tokens=1)
    rig.add("b", 30, max_tokens=1)
    rig.step()
    assert rig.plans[0].num_tokens.tolist() == [8, 8]
    alone = Rig(max_num_batched_tokens=16)
    alone.add("a", 30, max_tokens=1)
    alone.add("b", 3, max_tokens=1)
    alone.step()
    assert alone.plans[0].num_tokens.tolist() == [13, 3]  # what b left over goes to a


def test_threshold_raises_the_share() -> None:
    rig = Rig(max_num_batched_tokens=16, long_prefill_token_threshold=12)
    rig.add("a", 30, max_tokens=1)
    rig.add("b", 30, max_tokens=1)
    rig.step()
    assert rig.plans[0].num_tokens.tolist() == [12, 4]


def test_two_steps_in_flight_give_the_same_tokens() -> None:
    results = []
    for depth in (1, 2, 3):
        rig = Rig(in_flight=depth, max_num_batched_tokens=8)
        for name in "abc":
            rig.add(name, [ord(name)] * 9, max_tokens=7)
        results.append(rig.run())
        assert len(rig.scheduler.outstanding) == 0
    assert results[0] == results[1] == results[2]


def test_no_step_beyond_the_last_token() -> None:
    """What is in flight may already reach max_tokens: no row is planned to be thrown away."""
    rig = Rig(in_flight=2)
    rig.add("a", 4, max_tokens=2)
    rig.run()
    assert [p.num_tokens.tolist() for p in rig.plans] == [[4], [1]]


def test_plan_is_a_delta_over_slots() -> None:
    rig = Rig(max_slots=1, max_num_seqs=1)
    rig.add("a", 4, max_tokens=2)
    rig.add("b", 4, max_tokens=1)
    rig.run()
    first, second, third = rig.plans
    (admit,) = first.admits
    assert (admit.request_id, admit.slot, admit.prompt_len, admit.num_computed) == ("a", 0, 4, 0)
    assert admit.block_ids == ([1],)
    assert first.releases == []
    assert second.admits == []
    assert second.block_appends == [(0, 0, 1, [2])]
    assert third.releases == [0]  # freed by a, taken by b in the same plan
    assert third.admits[0].request_id == "b"
    assert third.slots.dtype == np.int32


# ---- admission ----------------------------------------------------------------------------------


def test_what_never_fits_is_refused_with_the_reason() -> None:
    rig = Rig(blocks=5, max_model_len=64)
    with pytest.raises(ContextTooLong, match="the context 64"):
        rig.add("a", 64)
    with pytest.raises(ContextTooLong, match="KV memory holds a request of at most 21"):
        rig.add("a", 30)
    with pytest.raises(InvalidRequest, match="lower max_tokens or raise") as caught:
        rig.add("a", 10, max_tokens=20)
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="no tokens"):
        rig.add("a", [])
    with pytest.raises(InvalidRequest, match="token ids"):
        rig.add("a", [-1])
    rig.add("a", 10, max_tokens=11)
    with pytest.raises(InvalidRequest, match="in use"):
        rig.add("a", 3)
    rig.add("b", 10, max_tokens=None)  # unlimited means: as far as memory goes
    assert {k: len(v) for k, v in rig.run().items()} == {"a": 11, "b": 11}
    assert rig.endings() == {"a": "length", "b": "length"}


def test_max_model_len_ends_a_request() -> None:
    rig = Rig(max_model_len=16)
    rig.add("a", 10, max_tokens=100)
    rig.add("edge", 15, max_tokens=100)
    assert {k: len(v) for k, v in rig.run().items()} == {"a": 6, "edge": 1}


def test_queue_limits() -> None:
    rig = Rig(max_num_queued_reqs=2)
    rig.add("a", 3)
    rig.add("b", 3)
    with pytest.raises(AdmissionError, match="max_num_queued_reqs"):
        rig.add("c", 3)
    rig.step()
    rig.add("c", 3)
    rig = Rig(max_num_queued_tokens=10)
    rig.add("a", 30)  # an empty queue takes any prompt, or it could never run
    with pytest.raises(AdmissionError, match="max_num_queued_tokens"):
        rig.add("b", 1)


def test_no_more_run_than_a_step_has_tokens() -> None:
    rig = Rig(max_num_batched_tokens=3, max_num_seqs=8)
    for index in range(6):
        rig.add(f"r{index}", 2, max_tokens=4)
    while rig.engine.has_work():
        rig.step()
        assert rig.engine.stats().num_running <= 3
        assert all(plan.total_tokens <= 3 for plan in rig.plans)


def test_fcfs_and_priority_order() -> None:
    def first_to_run(policy: str) -> list[str]:
        rig = Rig(policy=policy, max_num_seqs=1)
        for name, priority in (("a", 5), ("b", 1), ("c", 1), ("d", 0)):
            rig.add(name, 3, max_tokens=1, priority=priority)
        rig.run()
        return [a.request_id for plan in rig.plans for a in plan.admits]

    assert first_to_run("fcfs") == ["a", "b", "c", "d"]
    assert first_to_run("priority") == ["d", "b", "c", "a"]


def test_backfill_past_one_that_does_not_fit_until_it_is_old() -> None:
    rig = Rig(blocks=10, max_bypass_age_s=1.0, backfill=2, max_num_batched_tokens=64,
              prefix_caching=False)  # fmt: skip
    rig.add("runs", 20, max_tokens=20)
    rig.step()
    rig.add("big", 30, max_tokens=1)
    rig.add("small", [5] * 4, max_tokens=1)
    rig.step()
    assert "small" in rig.tokens()  # overtook
    assert "big" not in rig.tokens()
    rig.clock.now += 2.0
    rig.add("late", [6] * 4, max_tokens=1)
    rig.step(3)
    assert "late" not in rig.tokens()  # big has been overtaken for too long
    rig.run()
    order = [a.request_id for plan in rig.plans for a in plan.admits]
    assert order == ["runs", "small", "big", "late"]


def test_backfill_looks_at_few_candidates() -> None:
    rig = Rig(blocks=10, backfill=1, max_num_batched_tokens=64, prefix_caching=False)
    rig.add("runs", 20, max_tokens=20)
    rig.step()
    for name in ("big1", "big2"):
        rig.add(name, 30, max_tokens=1)
    rig.add("small", [5] * 4, max_tokens=1)
    rig.step()
    assert "small" not in rig.tokens()  # two were tried, the limit is one past the head


def test_watermark_stays_free_beside_others() -> None:
    rig = Rig(blocks=10, watermark=0.5, max_num_batched_tokens=64)
    rig.add("a", 24, max_tokens=2)  # alone: may use what it likes
    rig.step()
    rig.add("b", [7] * 4, max_tokens=1)
    rig.step()
    assert "b" not in [a.request_id for p in rig.plans for a in p.admits]
    assert set(rig.run()) == {"a", "b"}


def test_whole_prompt_must_fit_before_it_starts() -> None:
    rig = Rig(blocks=12, max_num_batched_tokens=8, prefix_caching=False)
    rig.add("a", 24, max_tokens=16)
    rig.step(3)
    rig.add("b", 32, max_tokens=1)
    rig.step()
    assert rig.engine.stats().num_running == 1  # a chunk of b would fit, b would not
    rig.run()
    assert rig.engine.stats().preemptions == 0


# ---- prefix cache -------------------------------------------------------------------------------


def test_second_request_reuses_the_prefix() -> None:
    rig = Rig()
    prompt = list(range(1, 22))
    rig.add("a", prompt, max_tokens=1)
    rig.run()
    rig.add("b", [*prompt[:16], 40, 41], max_tokens=1)
    rig.add("c", prompt, max_tokens=1, root_key=b"other tenant")
    rig.run()
    starts = {a.request_id: a.num_computed for p in rig.plans for a in p.admits}
    assert starts == {"a": 0, "b": 16, "c": 0}
    assert {o.request_id: o.num_cached_tokens for o in rig.outputs} == {"a": 0, "b": 16, "c": 0}
    stats = rig.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (60, 16)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (60, 16)


def test_outputs_are_cached_for_the_next_turn() -> None:
    rig = Rig()
    prompt = list(range(1, 10))
    rig.add("a", prompt, max_tokens=12)
    said = rig.run()["a"]
    rig.add("b", [*prompt, *said, 1], max_tokens=1)
    rig.run()
    assert rig.plans[-1].admits[0].num_computed == 20  # 20 of 21 tokens had been computed


def test_caching_off_and_reset() -> None:
    rig = Rig(prefix_caching=False)
    for name in "ab":
        rig.add(name, 12, max_tokens=1)
        rig.run()
    assert rig.plans[-1].admits[0].num_computed == 0
    rig = Rig()
    rig.add("a", 12, max_tokens=6)
    rig.step()
    assert not rig.engine.reset_prefix_cache()
    rig.run()
    assert rig.engine.reset_prefix_cache()
    rig.add("b", 12, max_tokens=1)
    rig.run()
    assert rig.plans[-1].admits[0].num_computed == 0


def test_hybrid_groups_share_one_pool() -> None:
    large = KVGroupSpec("large", "full", 4, 96)
    window = KVGroupSpec("w", "window", 4, 64, {"window": 6})
    rig = Rig(groups=(large, window), pool_bytes=96 * 64, max_num_batched_tokens=8)
    prompt = list(range(1, 30))
    rig.add("a", prompt, max_tokens=20)
    assert rig.run()["a"] == answer(prompt, 20)
    rig.add("b", prompt, max_tokens=2)
    rig.run()
    admit = rig.plans[-2].admits[0]
    assert admit.num_computed == 28
    assert admit.block_ids[1][:5] == [0] * 5  # left of the window: null blocks
    assert all(admit.block_ids[0])


# ---- preemption and tickets ---------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_tiny_pool_gives_the_tokens_of_a_large_one(
    depth: int, groups: tuple[KVGroupSpec, ...]
) -> None:
    answers = []
    for blocks in (12 * len(groups), 400):
        rig = Rig(groups=groups, blocks=blocks, in_flight=depth, max_num_batched_tokens=16)
        for index in range(6):
            rig.add(f"r{index}", [index + 1] * (5 + 2 * index), max_tokens=20)
        answers.append(rig.run())
        stats = rig.engine.stats()
        assert stats.kv_usage == 0.0
        assert (stats.preemptions > 0) == (blocks < 400 and groups != (WINDOW,))
    assert answers[0] == answers[1]


def test_victim_is_the_last_in_order_and_keeps_its_outputs() -> None:
    rig = Rig(blocks=8, max_num_batched_tokens=32, policy="priority", prefix_caching=False)
    rig.add("low", 10, max_tokens=10, priority=9)
    rig.step(2)
    rig.add("high", [3] * 10, max_tokens=14, priority=0)
    rig.run()
    assert rig.tokens()["low"] == answer(list(range(1, 11)), 10)
    resumed = [a for p in rig.plans for a in p.admits if a.request_id == "low"][1]
    assert resumed.num_computed == 0
    known = len(resumed.token_ids) - 10
    assert 2 <= known < 10
    assert resumed.token_ids[10:] == rig.tokens()["low"][:known]
    last = {o.request_id: o for o in rig.outputs}
    assert last["low"].num_preemptions == 1
    assert last["high"].num_preemptions == 0


def test_late_result_of_a_preempted_request_is_dropped() -> None:
    rig = Rig(in_flight=2)
    rig.add("a", 6, max_tokens=3)
    plan = rig.scheduler.schedule()
    assert plan is not None
    result = rig.device.execute(plan).wait()
    state = rig.scheduler.states["a"]
    rig.scheduler._requeue(state)
    assert rig.scheduler.commit(result) == []
    assert state.tokens == list(range(1, 7))
    assert rig.run()["a"] == answer(list(range(1, 7)), 3)  # sampled again, the same


def test_fragmented_pool_restarts_the_only_request_alone() -> None:
    """A sole runner that fits is never killed; one that never fits ends with the reason."""
    rig = Rig(blocks=12)
    rig.add("a", 10, max_tokens=10)
    rig.add("b", [9] * 6, max_tokens=3)
    rig.step()
    reserve, failures = rig.scheduler.kv.reserve, iter([True, True, False])

    def short(wants):  # type: ignore[no-untyped-def]
        if len(rig.scheduler.running) == 1 and next(failures, False):
            return None
        return reserve(wants)

    rig.step(3)  # b ends
    rig.scheduler.kv.reserve = short  # type: ignore[method-assign]
    rig.add("c", [8] * 6, max_tokens=3)
    rig.scheduler.pause = Pause.ADMISSION
    rig.step(4)
    assert rig.scheduler.states["a"].alone
    rig.scheduler.pause = Pause.NONE
    rig.step()
    assert [s.request_id for s in rig.scheduler.running] == ["a"]  # c waits for it
    assert rig.run()["a"] == answer(list(range(1, 11)), 10)

    rig = Rig(blocks=12)
    rig.add("a", 10, max_tokens=10)
    rig.step()
    rig.scheduler.kv.reserve = lambda *a: None  # type: ignore[method-assign]
    rig.scheduler.kv.fits_whole = lambda *a: True  # type: ignore[method-assign]
    state = rig.scheduler.states["a"]
    state.alone = True
    rig.step(4)
    assert rig.endings() == {"a": "error"}
    assert "too fragmented" in (rig.outputs[-1].error or "")


# ---- parking ------------------------------------------------------------------------------------


def test_park_and_wake() -> None:
    rig = Rig()
    rig.add("a", 9, max_tokens=4)
    rig.step(2)
    rig.scheduler.park("a", "grammar", deadline_s=5.0)
    assert rig.engine.stats().num_parked == 1
    assert rig.engine.stats().kv_usage == 0.0  # holds nothing while it waits
    assert rig.engine.has_work()  # it has a deadline
    assert rig.step() == []
    assert rig.scheduler.wake("a")
    assert not rig.scheduler.wake("a")
    assert rig.run()["a"] == answer(list(range(1, 10)), 4)


def test_deadlines_fail_or_wake() -> None:
    rig = Rig()
    for name in "abc":
        rig.add(name, 5, max_tokens=2)
    rig.scheduler.park("a", "compiling the grammar", 1.0)
    rig.scheduler.park("b", "loading", 2.0, on_deadline="wake")
    rig.scheduler.park("c", "loading", 0.5)
    rig.scheduler.wake("c")
    rig.scheduler.park("c", "loading again", 9.0)
    assert rig.scheduler.next_deadline_s() == 1.0
    rig.clock.now = 3.0
    rig.step(3)
    assert rig.endings() == {"a": "error", "b": "length"}
    (late,) = [o for o in rig.outputs if o.request_id == "a"]
    assert late.error == "compiling the grammar: not done before its deadline"
    assert rig.scheduler.states["c"].status is RequestStatus.PARKED
    rig.engine.abort(["c"])
    rig.run()
    assert rig.scheduler.next_deadline_s() is None
    with pytest.raises(ValueError, match="on_deadline"):
        rig.scheduler.park("x", "y", 1.0, on_deadline="explode")
    rig.scheduler.park("nobody", "y", 1.0)


# ---- seams --------------------------------------------------------------------------------------


class AtMost:
    """A constraint: at most `count` tokens per row, none for `blocked` requests."""

    def __init__(self, count: int) -> None:
        self.count, self.blocked, self.windows = count, set(), []

    def limit(self, request, window):  # type: ignore[no-untyped-def]
        self.windows.append(window)
        return 0 if request.request_id in self.blocked else min(self.count, len(window))


def test_constraints_shorten_and_hold_back_rows() -> None:
    some = AtMost(3)
    rig = Rig(constraints=[some])
    rig.add("a", 8, max_tokens=3)
    rig.add("b", [7] * 2, max_tokens=3)
    some.blocked.add("b")
    rig.step(2)
    assert [p.num_tokens.tolist() for p in rig.plans] == [[3], [3]]
    some.blocked = {"a"}
    rig.step(1)
    assert rig.plans[-1].admits[0].request_id == "b"
    some.blocked = set()
    assert rig.run()["a"] == answer(list(range(1, 9)), 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_token(depth: int) -> None:
    answers = []
    for drafts in (0, 3):
        rig = Rig(in_flight=depth, blocks=30, max_num_batched_tokens=12,
                  draft_budget=(lambda r, d=drafts: d) if drafts else None)  # fmt: skip
        for index in range(4):
            rig.add(f"r{index}", [index + 1] * 5, max_tokens=17)
        answers.append(rig.run())
        assert all(p.total_tokens <= 12 for p in rig.plans)
        stats = rig.engine.stats()
        assert bool(stats.draft_tokens) == bool(drafts)
        assert stats.accepted_tokens <= stats.draft_tokens
        if drafts:
            assert stats.accepted_tokens > 0
            assert max(int(p.num_drafts.max()) for p in rig.plans) == 3
    assert answers[0] == answers[1]


def test_pause_admission_lets_running_requests_finish() -> None:
    rig = Rig()
    rig.add("a", 3, max_tokens=3)
    rig.step()
    rig.engine.pause()
    rig.add("b", 3, max_tokens=3)
    rig.step(5)
    assert set(rig.tokens()) == {"a"}
    assert not rig.engine.has_work()
    rig.engine.resume()
    assert set(rig.run()) == {"a", "b"}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 2)), max_size=10),
    st.sampled_from([1, 2]),
    st.sampled_from([5, 9, 32]),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
)
def test_any_workload_gives_every_request_its_tokens(
    drafts: int,
    work: list[tuple[int, int, int]],
    depth: int,
    budget: int,
    policy: str,
    caching: bool,
) -> None:
    """Conservation: whatever the machine, each request gets exactly the fake model's answer."""
    rig = Rig(groups=(FULL, WINDOW), blocks=30, in_flight=depth, max_num_batched_tokens=budget,
              policy=policy, prefix_caching=caching,
              draft_budget=(lambda r: drafts) if drafts else None)  # fmt: skip
    want = {}
    for index, (length, outputs, priority) in enumerate(work):
        prompt = [(index % 2) + 1] * length
        rig.add(f"r{index}", prompt, max_tokens=outputs, priority=priority)
        want[f"r{index}"] = answer(prompt, outputs)
    got = rig.run()
    assert got == want
    assert all(p.total_tokens <= budget for p in rig.plans)
    assert all(a.step + 1 == b.step for a, b in pairwise(rig.plans))
    assert rig.scheduler.kv.pool.usage == 0.0
    assert len(rig.endings()) == len(work)
