"""Drafts made on the host: what plans carry, when, and what becomes of a card that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cardcage.core.config import load_config
from cardcage.core.contracts import DraftAsk
from cardcage.core.errors import ConfigError, EngineDead
from cardcage.core.host import Host, make_drafter
from cardcage.core.metrics import EngineMetrics
from cardcage.core.torture_device import VOCAB, fake_stream
from cardcage.core.types import EngineStats, KVGroupSpec
from tests.support.core_rig import FULL, Rig

if TYPE_CHECKING:
    from tests.core.conftest import FakeSite

WINDOW = KVGroupSpec("window", "window", 4, 64, {"window": 6})


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    draw = fake_stream(prompt, seed)
    return [draw() for _ in range(count)]


class Card:
    """Proposes `what(tokens, most)`; by default what the fake model says next (seed 0)."""

    def __init__(self, what: Callable[[Sequence[int], int], Any] = answer) -> None:
        self.what = what
        self.calls: list[tuple[Any, ...]] = []
        self.slots: dict[int, Sequence[int]] = {}

    def on_admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        assert slot not in self.slots
        self.slots[slot] = token_ids
        self.calls.append(("admit", slot, len(token_ids), prompt_len))

    def on_release(self, slot: int, token_ids: Sequence[int]) -> None:
        assert self.slots.pop(slot) is token_ids
        self.calls.append(("release", slot, len(token_ids)))

    def propose(self, asks: Sequence[DraftAsk]) -> list[Any]:
        self.calls.append(("propose", [(a.slot, len(a.token_ids), a.max_drafts) for a in asks]))
        return [self.what(ask.token_ids, ask.max_drafts) for ask in asks]


def noisy(tokens: Sequence[int], most: int) -> list[int]:
    """Often right, and careless: too many, or ids that are none."""
    rng = Random(len(tokens) * 31 + sum(tokens))
    drafts = [t if rng.random() < 0.7 else (t + 1) % VOCAB for t in answer(tokens, most)]
    return drafts + rng.choice([[], [-1], [VOCAB], [1, 2, 3]])


PROMPTS = {name: [index + 1] * 6 for index, name in enumerate("abcd")}


# ---- plans --------------------------------------------------------------------------------------


def test_right_drafts_save_steps() -> None:
    card = Card()
    rig = Rig(speculator=card, k=3)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)
    assert [p.num_tokens.tolist() for p in rig.plans] == [[6], [4], [4]]
    assert rig.plans[1].drafts == {0: answer(PROMPTS["a"], 4)[1:]}
    assert rig.plans[1].starts.tolist() == [6]
    stats = rig.engine.stats()
    assert (stats.draft_rows, stats.draft_tokens, stats.accepted_tokens) == (2, 6, 6)
    assert stats.accepted_per_position == [2, 2, 2]
    assert stats.generation_tokens == 9 == 1 + stats.draft_rows + stats.accepted_tokens
    assert card.calls == [
        ("admit", 0, 6, 6),
        ("propose", [(0, 7, 3)]),
        ("propose", [(0, 11, 3)]),
        ("release", 0, 15),
    ]


def test_wrong_drafts_cost_tokens_and_change_none() -> None:
    rig = Rig(speculator=Card(lambda tokens, most: [(answer(tokens, 1)[0] + 1) % VOCAB] * most))
    rig.add("a", PROMPTS["a"], max_tokens=9)
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)
    assert len(rig.plans) == 9
    stats = rig.engine.stats()
    assert stats.accepted_tokens == 0
    assert stats.draft_tokens == 3 * 5 + 2 + 1  # room shrinks towards the end
    assert stats.accepted_per_position == [0, 0, 0]


def test_the_last_tokens_have_no_drafts() -> None:
    """A draft beyond the limit of the request would be computed for nothing."""
    rig = Rig(speculator=Card(), k=8, max_model_len=12)
    rig.add("a", PROMPTS["a"], max_tokens=None)
    assert rig.run()["a"] == answer(PROMPTS["a"], 6)
    assert max(int((p.starts + p.num_tokens).max()) for p in rig.plans) <= 11


def test_ids_that_are_none_end_the_drafts() -> None:
    rig = Rig(speculator=Card(lambda tokens, most: [answer(tokens, 1)[0], VOCAB, 1]))
    rig.add("a", PROMPTS["a"], max_tokens=9)
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)
    assert {len(ids) for p in rig.plans for ids in p.drafts.values()} == {1}
    assert rig.engine.stats().drafter_failures == 0


def test_rows_with_drafts_follow_those_without() -> None:
    def some(tokens: Sequence[int], most: int) -> list[int]:
        return answer(tokens, most) if tokens[0] % 2 else []

    rig = Rig(speculator=Card(some))
    for name in "abcd":
        rig.add(name, PROMPTS[name], max_tokens=7)
    found = rig.run()
    assert found == {name: answer(PROMPTS[name], 7) for name in "abcd"}
    (plan, *_) = [p for p in rig.plans if p.drafts and p.num_rows == 4]
    assert plan.num_drafts.tolist() == [0, 0, 3, 3]


def test_drafts_keep_to_the_token_budget() -> None:
    rig = Rig(speculator=Card(), k=8, max_num_batched_tokens=10)
    for name in "abc":
        rig.add(name, PROMPTS[name], max_tokens=12)
    assert rig.run() == {name: answer(PROMPTS[name], 12) for name in "abc"}
    assert max(p.total_tokens for p in rig.plans) <= 10


def test_prefill_keeps_half_of_the_step() -> None:
    """A long prompt that arrives is not held up by drafts."""
    rig = Rig(speculator=Card(), k=16, max_num_batched_tokens=16)
    rig.add("a", PROMPTS["a"], max_tokens=40)
    rig.step(1)
    rig.add("b", 40, max_tokens=2)
    rig.step(1)
    assert rig.plans[-1].num_drafts.tolist() == [7, 0]
    assert rig.plans[-1].num_tokens.tolist() == [8, 8]


# ---- steps in flight ----------------------------------------------------------------------------


def test_one_step_at_a_time_while_drafting() -> None:
    rig = Rig(speculator=Card(), in_flight=2)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    rig.step()
    assert len(rig.plans) == 1
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)


def test_steps_run_ahead_while_drafting_rests() -> None:
    rig = Rig(speculator=Card(), in_flight=2, adaptive=True)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    rig.step()
    assert len(rig.plans) == 2  # nothing is drafted before plain steps were measured
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_adaptive_drafting_uses_what_is_right(depth: int) -> None:
    rig = Rig(speculator=Card(), in_flight=depth, adaptive=True, max_model_len=512, blocks=200)
    rig.add("a", PROMPTS["a"], max_tokens=400)
    assert rig.run()["a"] == answer(PROMPTS["a"], 400)
    stats = rig.engine.stats()
    assert stats.accepted_tokens > 150
    assert stats.steps < 250


def test_adaptive_drafting_goes_to_zero_on_wrong_drafts() -> None:
    def wrong(tokens: Sequence[int], most: int) -> list[int]:
        return [(answer(tokens, 1)[0] + 1) % VOCAB] * most

    rig = Rig(speculator=Card(wrong), in_flight=2, adaptive=True, max_model_len=2048, blocks=600)
    rig.add("a", PROMPTS["a"], max_tokens=1800)
    assert rig.run()["a"] == answer(PROMPTS["a"], 1800)
    drafting = [bool(p.drafts) for p in rig.plans]
    assert sum(drafting[-1000:]) < 40
    assert rig.drafter is not None
    assert rig.drafter.explain()["speedup_of_last_window"] < 1.0


# ---- whatever else happens ----------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_tiny_pool_with_drafts(groups: Any, adaptive: bool, depth: int) -> None:
    rig = Rig(
        speculator=Card(noisy),
        groups=groups,
        blocks=14,
        in_flight=depth,
        adaptive=adaptive,
        max_num_batched_tokens=12,
        max_model_len=40,
    )
    for index, name in enumerate("abcd"):
        rig.add(name, PROMPTS[name], max_tokens=12 + index)
    found = rig.run()
    for index, name in enumerate("abcd"):
        assert found[name] == answer(PROMPTS[name], 12 + index)
    assert rig.engine.stats().preemptions > 0
    assert rig.scheduler.kv.pool.usage == 0.0


def test_nobody_is_preempted_for_a_guess() -> None:
    rig = Rig(speculator=Card(), k=8, blocks=6, prefix_caching=False)
    rig.add("a", [1] * 7, max_tokens=5)
    rig.add("b", [2] * 7, max_tokens=5)
    assert rig.run() == {"a": answer([1] * 7, 5), "b": answer([2] * 7, 5)}
    assert rig.engine.stats().preemptions == 0


def test_a_resumed_request_is_admitted_with_its_outputs() -> None:
    card = Card()
    rig = Rig(speculator=card)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    rig.step(2)
    rig.scheduler.park("a", "test", 1e9)
    rig.scheduler.wake("a")
    assert rig.run()["a"] == answer(PROMPTS["a"], 9)
    assert [c for c in card.calls if c[0] != "propose"] == [
        ("admit", 0, 6, 6), ("release", 0, 11), ("admit", 0, 11, 6), ("release", 0, 15)
    ]  # fmt: skip


def test_stop_ids_and_logprobs_inside_a_block() -> None:
    text = answer(PROMPTS["a"], 12)
    stop = next(t for i, t in enumerate(text) if i in (2, 3) and t not in text[:i])
    rig = Rig(speculator=Card(), k=6)
    rig.add("a", PROMPTS["a"], max_tokens=12, stop_token_ids=(stop,), logprobs=1)
    assert rig.run()["a"] == text[: text.index(stop) + 1]
    assert rig.endings() == {"a": "stop"}
    entries = [e.token_id for o in rig.outputs for e in o.logprobs or []]
    assert entries == text[: text.index(stop) + 1]


def test_cached_prefixes_are_those_of_verified_tokens() -> None:
    rig = Rig(speculator=Card(noisy))
    rig.add("a", PROMPTS["a"], max_tokens=14)
    rig.run()
    again = [*PROMPTS["a"], *answer(PROMPTS["a"], 14)]
    rig.add("b", again, max_tokens=6)
    rig.run()  # the device checks every cell that it reads
    assert rig.tokens()["b"] == answer(again, 6)
    assert rig.engine.stats().prefix_hits >= 16


@pytest.mark.parametrize("mode", ["row", "rows", "step", "crash", "submit"])
@pytest.mark.parametrize("when", [1, 3])
def test_device_faults_with_drafts(mode: str, when: int) -> None:
    rig = Rig(speculator=Card(noisy), in_flight=2, max_num_seqs=2)
    for name in "abc":
        rig.add(name, PROMPTS[name], max_tokens=10)
    rig.step(when)
    rig.device.armed.append(mode)
    found = rig.run()
    for name, reason in rig.endings().items():
        if reason == "length":
            assert found[name] == answer(PROMPTS[name], 10)
    assert "length" in rig.endings().values()


# ---- cards that fail ----------------------------------------------------------------------------


class Broken(Card):
    def __init__(self, method: str, after: int) -> None:
        super().__init__()
        self.method, self.after = method, after

    def __getattribute__(self, name: str) -> Any:
        if name != "method" and name == self.method:
            self.after -= 1
            if self.after < 0:

                def broken(*args: Any) -> Any:
                    raise RuntimeError("the card fell out")

                broken.__name__ = name
                return broken
        return super().__getattribute__(name)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("method", ["on_admit", "propose", "on_release"])
def test_a_failing_card_is_left_out(
    method: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    card = Broken(method, after)
    rig = Rig(speculator=card, in_flight=2)
    with caplog.at_level(logging.ERROR):
        for name in "abc":
            rig.add(name, PROMPTS[name], max_tokens=9)
        rig.run()
        rig.add("d", PROMPTS["d"], max_tokens=9)
        rig.run()
    assert rig.tokens() == {name: answer(PROMPTS[name], 9) for name in "abcd"}
    assert rig.engine.stats().drafter_failures == 1
    (record,) = caplog.records
    assert f"speculator fake: {method} raised RuntimeError: the card fell out" in record.message
    assert "without drafts" in record.message
    assert not rig.plans[-1].drafts
    assert rig.drafter is not None
    assert "fell out" in rig.drafter.explain()["failure"]


@pytest.mark.parametrize(
    "given", [None, [], [[1], [2], [3]], [["x"]], [[1.5]], [5], [None]], ids=repr
)
def test_nonsense_is_a_failure(given: Any) -> None:
    card = Card()
    card.propose = lambda asks: given  # type: ignore[method-assign]
    rig = Rig(speculator=card)
    rig.add("a", PROMPTS["a"], max_tokens=5)
    assert rig.run()["a"] == answer(PROMPTS["a"], 5)
    assert rig.engine.stats().drafter_failures == 1


@pytest.mark.parametrize("method", ["on_admit", "propose"])
def test_a_fatal_card_ends_the_engine(method: str) -> None:
    rig = Rig(speculator=Broken(method, 0), fatal=True)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    rig.add("b", PROMPTS["b"], max_tokens=9)
    rig.step(1 if method == "on_admit" else 2)
    assert rig.endings() == {"a": "error", "b": "error"}
    assert all("fell out" in o.error for o in rig.outputs if o.error)
    with pytest.raises(EngineDead, match=r'speculator\.on_error is "fatal"'):
        rig.engine.step()
    with pytest.raises(EngineDead):
        rig.add("c", 3)


# ---- the composition root and the figures -------------------------------------------------------


def host_with(**tables: Any) -> Host:
    host = Host(load_config(overrides={"hardware": {"use": "cpu"}, **tables}))
    host.choose_hardware()
    return host


SOURCE: Any = SimpleNamespace(config={"vocab_size": 100})


def test_the_host_builds_what_is_named() -> None:
    assert make_drafter(host_with(), SOURCE) is None
    options = {"prompt_lookup_max": 3}
    table = {"use": "ngram", "k": 7, "adaptive": False, "on_error": "fatal", "options": options}
    drafter = make_drafter(host_with(speculator=table), SOURCE)
    assert drafter is not None
    assert (drafter.vocab_size, drafter.fatal, drafter.policy.k) == (100, True, 7)
    assert drafter.drafting
    assert drafter.speculator.longest == 3  # type: ignore[attr-defined]
    told = drafter.explain()
    assert (told["use"], told["k"], told["adaptive"]) == ("ngram", 7, False)
    assert "one while drafts are proposed" in str(told["steps_in_flight"])


@pytest.mark.parametrize(
    ("caps", "what"),
    [("needs_hidden=True", "hidden states"), ("dist='dense'", "a dense distribution")],
)
def test_cards_that_need_more_are_refused(site: FakeSite, caps: str, what: str) -> None:
    site.plugin("deep-dist", "speculators", "deep", f"SpeculatorCaps({caps})")
    with pytest.raises(ConfigError, match=what):
        make_drafter(host_with(speculator={"use": "deep"}), SOURCE)


def test_sampling_plugins_that_know_no_drafts_are_refused(site: FakeSite) -> None:
    site.plugin("old-dist", "sampling", "old", "SamplingCaps(draft_rows=False)")
    host = host_with(speculator={"use": "ngram"}, sampling={"use": ["old"]})
    with pytest.raises(ConfigError, match="sampling plugin old does not work with drafts"):
        make_drafter(host, SOURCE)


def test_metrics() -> None:
    rig = Rig(speculator=Card(), k=3)
    rig.add("a", PROMPTS["a"], max_tokens=9)
    rig.run()
    stats = rig.engine.stats()
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_draft_row == 4.0
    assert msgspec.convert(msgspec.to_builtins(stats), EngineStats) == stats
    metrics = EngineMetrics("m", 64)
    metrics.update(stats)
    text = metrics.text().decode()
    for line in (
        'spec_decode_num_drafts_total{engine="0",model_name="m"} 2.0',
        'spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 6.0',
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0',
        'spec_decode_mean_acceptance_length{engine="0",model_name="m"} 4.0',
        'spec_decode_drafter_failures_total{engine="0",model_name="m"} 0.0',
    ):
        assert line in text
