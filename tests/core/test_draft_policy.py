"""Acceptance estimates, step costs, and when drafting pays: all under simulated time."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from cardcage.core.draft_policy import Acceptance, DraftPolicy, Offer, StepCost, choose_drafts

# ---- acceptance ---------------------------------------------------------------------------------


def test_rates_are_learned_per_position() -> None:
    truth, rng, acceptance = (0.9, 0.6, 0.2), Random(1), Acceptance(3)
    sums, turns = [0.0] * 3, 0
    for turn in range(4000):
        kept = 0
        while kept < 3 and rng.random() < truth[kept]:
            kept += 1
        acceptance.observe(turn % 7, 3, kept)
        if turn > 400:
            turns += 1
            sums = [total + rate for total, rate in zip(sums, acceptance.rates())]
    for total, want in zip(sums, truth):
        assert abs(total / turns - want) < 0.02


def test_positions_after_a_rejection_say_nothing() -> None:
    acceptance = Acceptance(4)
    for _ in range(50):
        acceptance.observe(0, 4, 1)
    rates = acceptance.rates()
    assert rates[0] > 0.9
    assert rates[1] < 0.1
    assert rates[2:] == [0.5, 0.5]
    acceptance.observe(0, 2, 2)  # drafts that were not made say nothing either
    assert acceptance.rates()[2:] == [0.5, 0.5]


def test_a_request_of_its_own_kind_is_told_apart() -> None:
    acceptance = Acceptance(2)
    for _ in range(60):
        acceptance.observe(0, 2, 2)
        acceptance.observe(1, 2, 0)
    assert acceptance.rate(0, 0) > 0.85
    assert acceptance.rate(1, 0) < 0.15
    acceptance.release(1)
    assert 0.3 < acceptance.rate(1, 0) < 0.7  # the next tenant starts from everyone's rate


def test_relaxing_moves_towards_the_unknown() -> None:
    acceptance = Acceptance(1)
    for _ in range(100):
        acceptance.observe(0, 1, 0)
    before = acceptance.rate(0, 0)
    acceptance.relax()
    assert before < 0.05 < acceptance.rate(0, 0) < 0.5


# ---- costs --------------------------------------------------------------------------------------


def measured(times: dict[int, float]) -> StepCost:
    cost = StepCost()
    for size, seconds in times.items():
        for _ in range(4):
            cost.observe(size, seconds)
    return cost


def test_costs_between_below_and_beyond_what_was_measured() -> None:
    cost = measured({2: 1.0, 6: 3.0})
    assert [cost.seconds(n) for n in (1, 2, 4, 6)] == [1.0, 1.0, 2.0, 3.0]
    assert cost.seconds(8) == pytest.approx(4.0)
    assert measured({4: 1.0}).seconds(6) == pytest.approx(1.1)  # a guess until it is measured
    assert StepCost().seconds(3) is None


def test_costs_never_fall_with_the_size() -> None:
    cost = measured({1: 1.0, 2: 0.7, 4: 1.5})
    found = [cost.seconds(n) for n in range(1, 9)]
    assert found == sorted(found)


def test_a_stumble_does_not_stick() -> None:
    cost = StepCost()
    cost.observe(3, 50.0)  # compiled something
    assert cost.seconds(3) is None
    cost.observe(3, 1.0)
    assert cost.seconds(3) == 1.0
    cost.observe(3, 50.0)
    assert cost.seconds(3) < 1.5
    assert cost.known(3)


def test_sizes_are_few() -> None:
    assert len({StepCost.bucket(n) for n in range(1, 4097)}) < 50
    assert all(n <= StepCost.bucket(n) <= 1.25 * n for n in range(1, 4097))


# ---- the choice within a step -------------------------------------------------------------------


def brute_force(survivals: list[list[float]], rows: int, cost: StepCost, cap: int) -> float:
    best = 0.0
    for depths in itertools.product(*(range(len(s) + 1) for s in survivals)):
        if sum(depths) <= cap:
            gain = rows + sum(sum(s[:d]) for s, d in zip(survivals, depths))
            best = max(best, gain / cost.seconds(rows + sum(depths)))
    return best


def test_choice_is_the_best_of_all() -> None:
    rng = Random(5)
    for _ in range(60):
        rows = rng.randint(1, 3)
        survivals = []
        for _ in range(rows):
            chance, chances = 1.0, []
            for _ in range(rng.randint(0, 3)):
                chance *= rng.random()
                chances.append(chance)
            survivals.append(chances)
        # Stairs: the first decrease is not the end.
        times = {n: 1.0 + 0.4 * (n > 3) + 0.9 * (n > 7) * rng.random() for n in range(1, 13)}
        cost, cap = measured(times), rng.randint(0, 9)
        chosen = choose_drafts(survivals, rows, cost, cap)
        assert sum(chosen) <= cap
        gain = rows + sum(sum(s[:d]) for s, d in zip(survivals, chosen))
        got = gain / cost.seconds(rows + sum(chosen))
        best, none = brute_force(survivals, rows, cost, cap), rows / cost.seconds(rows)
        assert got == pytest.approx(best if best > 1.02 * none else none)


def test_ties_go_to_the_shallower_draft() -> None:
    chosen = choose_drafts([[1.0, 1.0], [1.0, 1.0]], 2, measured({1: 1.0, 8: 1.0}), 3)
    assert chosen == [2, 1]


def test_dearer_verification_never_verifies_more() -> None:
    survivals = [[0.8, 0.6, 0.45, 0.3]] * 2
    last = 9
    for slope in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 5.0):
        cost = measured({n: 1.0 + slope * n for n in range(1, 11)})
        now = sum(choose_drafts(survivals, 2, cost, 8))
        assert now <= last
        last = now
    assert last == 0


def test_without_adaptation_everything_is_verified() -> None:
    policy = DraftPolicy(4, adaptive=False)
    assert policy.drafting
    assert policy.choose([Offer(0, 4), Offer(1, 3)], 2, 5) == [4, 1]
    for _ in range(100):
        policy.finish(True, 1, 4, 0, 9.0)
    assert policy.drafting


# ---- over many steps ----------------------------------------------------------------------------


class Machine:
    """Decodes `rows` requests; drafts are right with a chance, steps take what `seconds` says."""

    def __init__(self, rows: int, chance: float, slope: float, noise: float = 0.0) -> None:
        self.policy, self.rng = DraftPolicy(4), Random(3)
        self.rows, self.chance, self.slope, self.noise = rows, chance, slope, noise
        self.seconds = self.tokens = 0.0
        self.drafts: list[int] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            drafting, chosen, kept = self.policy.drafting, [0] * self.rows, 0
            if drafting:
                offers = [Offer(slot, 4) for slot in range(self.rows)]
                chosen = self.policy.choose(offers, self.rows, 64)
            for slot, drafted in enumerate(chosen):
                good = 0
                while good < drafted and self.rng.random() < self.chance:
                    good += 1
                if drafted:
                    self.policy.observe(slot, drafted, good)
                kept += good
            # One step at a time costs a little, drafts cost by the token.
            took = 1.0 + 0.05 * drafting + self.slope * sum(chosen)
            took *= 1.0 + self.noise * self.rng.random()
            self.policy.finish(drafting, self.rows, sum(chosen), kept, took)
            self.seconds += took
            self.tokens += self.rows + kept
            self.drafts.append(sum(chosen))

    @property
    def speedup(self) -> float:
        mean = 1.0 + self.noise / 2
        return (self.tokens / self.seconds) / (self.rows / mean)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_good_drafts_are_used(rows: int, noise: float) -> None:
    machine = Machine(rows, chance=0.8, slope=0.05, noise=noise)
    machine.run(2000)
    assert machine.speedup > 1.3
    assert sum(map(bool, machine.drafts)) > 1500


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5])
def test_wrong_drafts_are_turned_down_to_zero(rows: int, noise: float, slope: float) -> None:
    machine = Machine(rows, chance=0.0, slope=slope, noise=noise)
    machine.run(4000)
    assert machine.speedup > 0.97  # within 3 % of no speculation
    assert sum(map(bool, machine.drafts[-2000:])) < 60  # a look now and then
    assert machine.policy.speedup is not None
    assert machine.policy.speedup <= 1.0


def test_right_drafts_that_cost_too_much_are_turned_down() -> None:
    machine = Machine(1, chance=0.5, slope=0.8)
    machine.run(4000)
    assert machine.speedup > 0.97


def test_drafting_comes_back_when_it_pays_again() -> None:
    machine = Machine(2, chance=0.0, slope=0.05)
    machine.run(3000)
    assert not machine.policy.drafting
    machine.chance = 0.9
    machine.run(1500)
    assert sum(map(bool, machine.drafts[-500:])) > 450


def test_another_batch_size_is_measured_before_it_is_judged() -> None:
    machine = Machine(1, chance=0.8, slope=0.02)
    machine.run(300)
    assert machine.policy.drafting
    machine.rows = 6
    machine.run(2)
    assert not machine.policy.drafting  # steps of six rows without drafts are unknown
    machine.run(20)
    assert machine.policy.drafting
    assert machine.policy.plain.known(6)


def test_mixed_steps_and_transitions_are_not_timed() -> None:
    policy = DraftPolicy(2)
    policy.finish(True, 1, 1, 1, 0.001)  # planned before drafting was off
    assert policy.plain.seconds(1) is None
    assert policy.drafted.seconds(2) is None
