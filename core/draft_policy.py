"""How many drafts a step verifies: what they are expected to bring against what they cost.

Three parts, pure arithmetic without a clock. `Acceptance` estimates how likely the draft at each
position is kept, from what verification said. `StepCost` remembers how long a step of so many
tokens took. `DraftPolicy` puts them together: within a step it takes the drafts that raise tokens
per second (a global maximum, because costs come in stairs), and over many steps it compares with
steps without drafts and turns drafting off while it does not pay, looking again now and then.

Steps with drafts need the tokens of the step before on the host, so they run one at a time; steps
without run ahead of their results. The comparison includes that.

Source: spec/speculation.md 8 and 9.2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Acceptance", "DraftPolicy", "Offer", "StepCost", "choose_drafts"]

_FORGET = 0.98  # per observed row: the last 50 rows decide
_OWN_WEIGHT = 4.0  # rows of a request's own history that weigh as much as everyone's
_SLOPE = 0.05  # a token more costs this share of the smallest known step, until it is known
_SMOOTH = 0.2  # weight of the newest time of a size
_OUTLIER = 3.0  # a step this many times slower than known counts as this many times
_KNOWN = 3  # times that make a size known
_CALIBRATION = 5  # steps without drafts that measure them; the first is a transition
_WINDOW, _PROBE = 24, 8  # steps with drafts that are judged: usually, and after a rest
_REST, _LONGEST_REST = 64, 512  # steps without drafts after a bad judgement, doubling
_PAYS = 1.02  # tokens per second against those without drafts, from which drafts pay
_HOPELESS = 0.8  # a window that pays less is judged after as few steps as a probe
_RELEARN = 4  # rests in a row after which the costs of drafts are measured anew
_REFRESH = 512  # steps with drafts after which those without are measured again


@dataclass(frozen=True, slots=True)
class Offer:
    """`num_drafts` proposed for the request in a slot."""

    slot: int
    num_drafts: int


class Acceptance:
    """Probability that the draft at a position is kept if all before it were: [k], from 0.

    Two estimates are mixed: per position over all requests, and per request over all positions.
    Both forget slowly.
    """

    def __init__(self, k: int) -> None:
        self._seen = [2.0] * k  # Beta(1, 1): a half until something is known
        self._kept = [1.0] * k
        self._own: dict[int, list[float]] = {}  # slot -> [seen, kept]

    def observe(self, slot: int, drafted: int, kept: int) -> None:
        """A row verified `drafted` drafts and kept the first `kept`; later ones say nothing."""
        own = self._own.setdefault(slot, [0.0, 0.0])
        for position in range(min(kept + 1, drafted)):
            hit = position < kept
            self._seen[position] = self._seen[position] * _FORGET + 1.0
            self._kept[position] = self._kept[position] * _FORGET + hit
            own[0] = own[0] * _FORGET + 1.0
            own[1] = own[1] * _FORGET + hit

    def rate(self, slot: int, position: int) -> float:
        """The estimate for a draft of the request in a slot."""
        everyone = self._kept[position] / self._seen[position]
        seen, kept = self._own.get(slot, (0.0, 0.0))
        return (kept + _OWN_WEIGHT * everyone) / (seen + _OWN_WEIGHT)

    def release(self, slot: int) -> None:
        """The request left the slot."""
        self._own.pop(slot, None)

    def relax(self) -> None:
        """Trust what is known less, so that a new look can change it."""
        for position, (seen, kept) in enumerate(zip(self._seen, self._kept)):
            rate, weight = kept / seen, min(seen, 4.0)
            # Half way back to what is assumed of the unknown.
            self._seen[position], self._kept[position] = weight, weight * (rate + 0.5) / 2
        self._own.clear()

    def rates(self) -> list[float]:
        """Per position, over all requests."""
        return [kept / seen for seen, kept in zip(self._seen, self._kept)]


class StepCost:
    """Seconds of a step by its number of tokens: measured sizes, lines between them."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._sizes: list[int] = []
        self._stairs: list[float] = []  # per size: never cheaper than a smaller one

    @staticmethod
    def bucket(num_tokens: int) -> int:
        """Sizes up to 8 by themselves, larger ones in steps of at most an eighth."""
        step = 1
        while num_tokens > 8 * step:
            step *= 2
        return -(-num_tokens // step) * step

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = self.bucket(num_tokens)
        times = self._times[size] = self._times.get(size, 0) + 1
        old = self._seconds.get(size, seconds)
        if times == 2:  # a first time may hold compilation or a stumble of the machine
            self._seconds[size] = min(old, seconds)
        else:
            self._seconds[size] = old + _SMOOTH * (min(seconds, _OUTLIER * old) - old)
        self._sizes = sorted(size for size, times in self._times.items() if times > 1)
        self._stairs, top = [], 0.0
        for known in self._sizes:
            top = max(top, self._seconds[known])
            self._stairs.append(top)

    def known(self, num_tokens: int) -> bool:
        """Whether this size has been measured a few times."""
        return self._times.get(self.bucket(num_tokens), 0) >= _KNOWN

    def seconds(self, num_tokens: int) -> float | None:
        """The expected time; None while no size is known."""
        sizes, stairs = self._sizes, self._stairs
        if not sizes:
            return None
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):
            slope = _SLOPE * stairs[0]
            if at > 1:
                measured = (stairs[-1] - stairs[0]) / (sizes[-1] - sizes[0])
                slope = measured
            return stairs[-1] + slope * (num_tokens - sizes[-1])
        if at == 0 or sizes[at] == num_tokens:
            return stairs[at]
        share = (num_tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return stairs[at - 1] + share * (stairs[at] - stairs[at - 1])


def choose_drafts(
    survivals: Sequence[Sequence[float]], num_rows: int, cost: StepCost, cap: int
) -> list[int]:
    """How many drafts of each request to verify, `cap` in all.

    Maximises (num_rows + expected kept drafts) / seconds of (num_rows + drafts) tokens; none if
    the best is hardly better.

    Args:
        survivals: per request, the probability that draft j and all before it are kept.
        num_rows: requests that emit a token anyway.
        cost: of steps with drafts.
    """
    # Ties go to the shallower draft: a deeper one may never displace it.
    ranked = sorted(
        (-chance, depth, index)
        for index, chances in enumerate(survivals)
        for depth, chance in enumerate(chances)
    )[:cap]
    best, best_rate, bar, gain = 0, 0.0, 0.0, float(num_rows)
    for count in range(len(ranked) + 1):
        gain -= ranked[count - 1][0] if count else 0.0
        seconds = cost.seconds(num_rows + count)
        if seconds is None:  # nothing measured yet: whatever is likely
            rate = gain / (1.0 + _SLOPE * count)
        else:
            rate = gain / max(seconds, 1e-12)
        if rate > max(best_rate, bar):
            best, best_rate = count, rate
        if count == 0:
            bar = _PAYS * rate
    chosen = [0] * len(survivals)
    for _, _, index in ranked[:best]:
        chosen[index] += 1
    return chosen


class DraftPolicy:
    """Decides whether the next step may have drafts, and which.

    The caller asks `drafting`, then `choose` for the proposals that it got, and reports every
    step with `finish` and every verified row with `observe`.

    Args:
        k: most drafts of one row.
        adaptive: False verifies whatever is proposed, always.
    """

    def __init__(self, k: int, adaptive: bool = True) -> None:
        self.k, self.adaptive = k, adaptive
        self.drafting = not adaptive
        self.acceptance = Acceptance(k)
        self.plain, self.drafted = StepCost(), StepCost()
        self.speedup: float | None = None  # of the last judged window
        self._pause = _CALIBRATION  # steps without drafts that are still to come
        self._rest, self._rests = _REST, 0
        self._fresh = True  # the next step follows a change: its time says nothing
        self._since_refresh = 0
        self._forget_window(_WINDOW)

    def choose(self, offers: Sequence[Offer], num_rows: int, cap: int) -> list[int]:
        """Drafts to verify of each offer, at most `cap` in all, beside `num_rows` tokens."""
        if self.adaptive:
            survivals = [self._survivals(offer) for offer in offers]
            return choose_drafts(survivals, num_rows, self.drafted, cap)
        chosen = []
        for offer in offers:
            chosen.append(min(offer.num_drafts, cap))
            cap -= chosen[-1]
        return chosen

    def _survivals(self, offer: Offer) -> list[float]:
        chance, chances = 1.0, []
        for position in range(offer.num_drafts):
            chance *= self.acceptance.rate(offer.slot, position)
            chances.append(chance)
        return chances

    def observe(self, slot: int, drafted: int, kept: int) -> None:
        """A row's verdict: the first `kept` of `drafted` drafts were right."""
        self.acceptance.observe(slot, drafted, kept)

    def release(self, slot: int) -> None:
        """The request left the slot."""
        self.acceptance.release(slot)

    def finish(self, drafting: bool, rows: int, drafts: int, kept: int, seconds: float) -> None:
        """A step of decode rows alone is done.

        Args:
            drafting: what `drafting` said when it was planned.
            rows: requests in it, each of which emitted a token and its kept drafts.
            drafts: how many were verified.
            kept: how many were right.
            seconds: since the step before it was done, or since it was planned.
        """
        if not self.adaptive or drafting != self.drafting:
            return
        if self._fresh:
            self._fresh = False
        elif drafting:
            self.drafted.observe(rows + drafts, seconds)
            self._count(rows, kept, seconds)
        else:
            self.plain.observe(rows, seconds)
        self._move(rows)

    def _count(self, rows: int, kept: int, seconds: float) -> None:
        plain = self.plain.seconds(rows)
        if plain is None:
            return
        # Outliers are the machine's, not the drafts': cut them as `StepCost` does.
        self._window_seconds += min(seconds, _OUTLIER * plain)
        # The seconds that the same tokens would have taken without drafts.
        self._window_plain += plain * (rows + kept) / rows
        self._window_rows += rows
        self._window_kept += kept
        self._window_steps += 1
        self._since_refresh += 1

    def _move(self, rows: int) -> None:
        """Whether the next step drafts."""
        if not self.drafting:
            self._pause -= 1
            if self._pause <= 0:
                self._turn(True)
            return
        if not self.plain.known(rows):
            self._turn(False, _CALIBRATION)
        elif self._window_steps >= min(self._window, _PROBE):
            self._judge()

    def _judge(self) -> None:
        """Whether the steps of the window paid, once there are enough or they are hopeless."""
        speedup = self._window_plain / max(self._window_seconds, 1e-12)
        # A step is never faster for the drafts in it: what says so is noise.
        speedup = min(speedup, 1.0 + self._window_kept / self._window_rows)
        if self._window_steps < self._window and speedup > _HOPELESS:
            return
        self.speedup = speedup
        if speedup >= _PAYS:
            self._rest, self._rests = _REST, 0
            self._forget_window(_WINDOW)
            if self._since_refresh >= _REFRESH:
                self._since_refresh = 0
                self._turn(False, _CALIBRATION)
            return
        self._turn(False, self._rest)
        self._rest, self._rests = min(2 * self._rest, _LONGEST_REST), self._rests + 1
        self.acceptance.relax()
        self._forget_window(_PROBE)
        if self._rests % _RELEARN == 0:  # the machine may have changed, too
            self.drafted = StepCost()

    def _turn(self, drafting: bool, pause: int = 0) -> None:
        self.drafting, self._pause, self._fresh = drafting, pause, True

    def _forget_window(self, steps: int) -> None:
        self._window, self._window_steps = steps, 0
        self._window_seconds = self._window_plain = 0.0
        self._window_rows = self._window_kept = 0

    def explain(self) -> dict[str, object]:
        """What is known, JSON-able."""
        return {
            "adaptive": self.adaptive,
            "drafting": self.drafting,
            "acceptance_by_position": [round(rate, 3) for rate in self.acceptance.rates()],
            "speedup_of_last_window": None if self.speedup is None else round(self.speedup, 3),
        }
