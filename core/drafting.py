"""Between the scheduler and a speculator: asks, checks, counts, and survives a card that fails.

The scheduler asks for drafts while it plans a step of whose requests every token is on the host,
and reports what verification said. A card that raises, or answers nonsense, ends drafting for the
run (or the engine, as configured); it never changes a text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cardcage.core.contracts import DraftAsk, Speculator
from cardcage.core.draft_policy import DraftPolicy, Offer
from cardcage.core.errors import EngineDead
from cardcage.core.types import EngineStats

logger = logging.getLogger(__name__)

__all__ = ["Drafter", "DraftingStep"]


@dataclass(frozen=True, slots=True)
class DraftingStep:
    """What is known of a step in flight, for the policy. Only steps of decode rows are timed."""

    drafting: bool
    rows: int
    drafts: int
    decodes_only: bool


class Drafter:
    """Owns a speculator and the policy for it.

    Args:
        speculator: the card.
        name: of the card, for messages.
        policy: how many drafts.
        vocab_size: ids from here on are no drafts.
        fatal: a failing card ends the engine instead of drafting.
        clock: the scheduler's.
    """

    def __init__(
        self,
        speculator: Speculator,
        name: str,
        policy: DraftPolicy,
        vocab_size: int,
        fatal: bool,
        clock: Callable[[], float],
    ) -> None:
        self.speculator, self.name, self.policy = speculator, name, policy
        self.vocab_size, self.fatal = vocab_size, fatal
        self.failure: str | None = None
        self.error: EngineDead | None = None  # set once by a failure of a fatal card
        self._clock = clock
        self._known: set[int] = set()  # slots that the card was told of
        self._steps: dict[int, DraftingStep] = {}
        self._since: float | None = None

    @property
    def drafting(self) -> bool:
        """Whether the next step may have drafts, and so must know the results of all others."""
        return self.failure is None and self.policy.drafting

    # ---- requests -------------------------------------------------------------------------------

    def admit(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        """A request took a slot."""
        if self.failure is None:
            self._known.add(slot)
            self._call(self.speculator.on_admit, slot, token_ids, prompt_len)

    def release(self, slot: int, token_ids: Sequence[int]) -> None:
        """The request left it."""
        self.policy.release(slot)
        if slot in self._known:
            self._known.discard(slot)
            self._call(self.speculator.on_release, slot, token_ids)

    # ---- a step ---------------------------------------------------------------------------------

    def propose(self, asks: Sequence[DraftAsk], num_rows: int, cap: int) -> dict[int, list[int]]:
        """Drafts by slot: at most the card's, at most `cap` in all, as many as pay."""
        asks = [ask for ask in asks if ask.max_drafts > 0]
        if not asks or cap <= 0:
            return {}
        answer = self._call(self.speculator.propose, asks)
        if self.failure is not None:
            return {}
        try:
            drafts = [self._checked(ask, given) for ask, given in zip(asks, answer, strict=True)]
        except (TypeError, ValueError) as error:
            self._fail(f"answered {len(asks)} asks wrongly: {error}", error)
            return {}
        offers = [Offer(ask.slot, len(ids)) for ask, ids in zip(asks, drafts)]
        chosen = self.policy.choose(offers, num_rows, cap)
        return {ask.slot: ids[:n] for ask, ids, n in zip(asks, drafts, chosen) if n}

    def _checked(self, ask: DraftAsk, given: Sequence[int]) -> list[int]:
        """The drafts up to the first that is no token; raises for what are no integers."""
        drafts: list[int] = []
        for token in given:
            number = int(token)
            if number != token:
                raise TypeError(f"{token!r} is no token id")
            if len(drafts) == ask.max_drafts or not 0 <= number < self.vocab_size:
                break
            drafts.append(number)
        return drafts

    def planned(self, step: int, rows: int, drafts: int, decodes_only: bool) -> None:
        """A step was planned: `rows` of it decode."""
        if self.failure is None:
            self._steps[step] = DraftingStep(self.drafting, rows, drafts, decodes_only)
            if self._since is None:
                self._since = self._clock()

    def finished(self, step: int, kept: int, idle: bool) -> None:
        """A step's result was committed; `idle`: nothing is left to do."""
        done = self._steps.pop(step, None)
        if done is None or self.failure is not None:
            return
        now = self._clock()
        if self._since is not None and done.decodes_only:
            self.policy.finish(done.drafting, done.rows, done.drafts, kept, now - self._since)
        self._since = None if idle else now

    def observe(self, slot: int, drafted: int, kept: int) -> None:
        """A row's verdict."""
        self.policy.observe(slot, drafted, kept)

    def forget_steps(self) -> None:
        """Steps in flight have no results."""
        self._steps.clear()
        self._since = None

    # ---- failure --------------------------------------------------------------------------------

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self._fail(f"{function.__name__} raised {type(error).__name__}: {error}", error)
            return None

    def _fail(self, what: str, cause: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = f"speculator {self.name}: {what}"
        self.forget_steps()
        if self.fatal:
            self.error = EngineDead(f'{self.failure}; speculator.on_error is "fatal"')
            self.error.__cause__ = cause
            return
        logger.error(
            "%s; the engine goes on without drafts for the rest of the run",
            self.failure,
            exc_info=(type(cause), cause, cause.__traceback__),
        )

    # ---- figures --------------------------------------------------------------------------------

    def fill(self, stats: EngineStats) -> None:
        """Put in what the scheduler does not count."""
        stats.drafter_failures = int(self.failure is not None)

    def explain(self) -> dict[str, object]:
        """What runs and how, JSON-able."""
        return {
            "use": self.name,
            "k": self.policy.k,
            "verification": "coupled: a draft is kept if it is the token drawn without drafts",
            "steps_in_flight": "one while drafts are proposed (the host must know all tokens), "
            "the configured number while drafting rests",
            "on_error": "fatal" if self.fatal else "disable",
            **({"failure": self.failure} if self.failure else {}),
            **self.policy.explain(),
        }
