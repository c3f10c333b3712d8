"""The scheduler's numbers, and the seam for plugins that have a say in a row's length."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cardcage.core.errors import ConfigError
from cardcage.core.types import Request

_AT_LEAST = {
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_model_len": 1,
    "steps_in_flight": 1,
    "long_prefill_token_threshold": 0,
    "backfill": 0,
    "max_num_queued_reqs": 0,
    "max_num_queued_tokens": 0,
    "max_bypass_age_s": 0,
}


class Pause(Enum):
    """What `schedule` may not do."""

    NONE = "none"
    ADMISSION = "admission"  # running requests go on, no other starts
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's numbers. Raises ConfigError when one is out of range.

    max_num_batched_tokens: tokens of one step.
    max_num_seqs: requests that run at once; never more than a step has tokens or the executor
        has slots.
    policy: "fcfs", or "priority" (a smaller number runs sooner, then arrival).
    prefix_caching: keep finished blocks and reuse equal prefixes.
    long_prefill_token_threshold: while several prefills want tokens, one takes at most
        max(this, half the budget) of a step, and what the others leave over.
    max_num_queued_reqs, max_num_queued_tokens: admission limits, 0 = off.
    watermark: share of the pool that stays free when a request joins others, [0, 1).
    backfill: requests tried past one that does not fit.
    max_bypass_age_s: for how long a request may be overtaken so.
    steps_in_flight: steps planned ahead of their results.
    root_seed: model revision and KV format, the root of all prefix keys.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 2048
    policy: str = "fcfs"
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    watermark: float = 0.0
    backfill: int = 8
    max_bypass_age_s: float = 2.0
    steps_in_flight: int = 2
    root_seed: bytes = b""

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            if getattr(self, name) < low:
                raise ConfigError(f"scheduler.{name} must be >= {low}, got {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"scheduler.watermark must be in [0, 1), got {self.watermark}")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduler.policy must be fcfs or priority, got {self.policy!r}")

    @property
    def in_flight_tokens(self) -> int:
        """Most tokens of one request that can be unconfirmed. The only place that says so."""
        return self.steps_in_flight * self.max_num_batched_tokens


class Constraint(Protocol):
    """A plugin's say in how many tokens a request gets (encoder budget, adapter slots, ...)."""

    def limit(self, request: Request, window: range) -> int:
        """How many of the positions `window` may run in this step, 0..len(window).

        Called while a step is planned, for each row; must be pure and fast. A request that can
        get nothing for longer must be parked, not answered with 0 for ever.
        """
