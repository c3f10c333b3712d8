"""Where requests wait: the runnable ones in policy order, the parked ones with their deadlines.

Nothing here is polled: a parked request comes back by an event or when its deadline is due.
Holds no blocks and no slots; the scheduler moves requests in and out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter

from cardcage.core.errors import AdmissionError
from cardcage.core.request_state import RequestState
from cardcage.core.scheduler_config import SchedulerConfig
from cardcage.core.types import RequestStatus

BY_KEY = attrgetter("key")


class RequestQueue:
    """Waiting and parked requests. A request is in at most one of the two."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.waiting: list[RequestState] = []  # sorted by key
        self.parked: dict[str, RequestState] = {}
        self.num_tokens = 0  # prompt tokens of all of them
        self._config = config
        self._deadlines: list[tuple[float, int, str, bool]] = []
        self._parkings = 0

    def check_room(self, prompt_len: int) -> None:
        """Raises AdmissionError when one more request exceeds the admission limits."""
        queued, config = len(self.waiting) + len(self.parked), self._config
        if config.max_num_queued_reqs and queued >= config.max_num_queued_reqs:
            raise AdmissionError(
                f"{queued} requests are queued and the limit (max_num_queued_reqs) is "
                f"{config.max_num_queued_reqs}; try again later"
            )
        limit = config.max_num_queued_tokens
        if limit and queued and self.num_tokens + prompt_len > limit:
            raise AdmissionError(
                f"{self.num_tokens} prompt tokens are queued and the limit "
                f"(max_num_queued_tokens) is {limit}; try again later"
            )

    def push(self, state: RequestState) -> None:
        """Make a request runnable, in the place that its key gives it."""
        started = state.num_cached is not None
        state.status = RequestStatus.PREEMPTED if started else RequestStatus.WAITING
        state.park_reason, state.blocked_at, state.bypassed_since_s = None, -1, None
        insort(self.waiting, state, key=BY_KEY)
        self.num_tokens += state.prompt_len

    def park(self, state: RequestState, reason: str, deadline_s: float, fails: bool) -> None:
        """Keep a request until an event or its deadline; `fails` is for whoever asks `due`."""
        self._parkings += 1
        state.status, state.park_reason = RequestStatus.PARKED, reason
        state.park_ticket = self._parkings
        self.parked[state.request_id] = state
        self.num_tokens += state.prompt_len
        heapq.heappush(self._deadlines, (deadline_s, self._parkings, state.request_id, fails))

    def remove(self, state: RequestState) -> None:
        """Take out a request that waits or is parked."""
        self.num_tokens -= state.prompt_len
        if state.status is RequestStatus.PARKED:
            del self.parked[state.request_id]
        else:
            del self.waiting[bisect_left(self.waiting, state.key, key=BY_KEY)]

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a parked request, None without any."""
        while self._deadlines:
            deadline, ticket, request_id, _ = self._deadlines[0]
            state = self.parked.get(request_id)
            if state is not None and state.park_ticket == ticket:
                return deadline
            heapq.heappop(self._deadlines)  # woken or gone since
        return None

    def pop_due(self, now_s: float) -> tuple[str, bool] | None:
        """(request id, fails) of a parked request whose deadline is due, each reported once."""
        deadline = self.next_deadline_s()
        if deadline is None or deadline > now_s:
            return None
        _, _, request_id, fails = heapq.heappop(self._deadlines)
        return request_id, fails
