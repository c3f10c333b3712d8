"""A scheduler and engine on the pretend device of `cardcage torture`, for tests of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from cardcage.core.contracts import KVKind
from cardcage.core.draft_policy import DraftPolicy
from cardcage.core.drafting import Drafter
from cardcage.core.engine import Engine
from cardcage.core.scheduler import Scheduler, SchedulerConfig
from cardcage.core.torture_device import VOCAB, FakeDevice, VirtualClock
from cardcage.core.types import (
    KVCapacity,
    KVGroupSpec,
    Request,
    SamplingParams,
    StepPlan,
    TokenOutput,
)
from cardcage.plugins.kv_kinds.full import FullKind
from cardcage.plugins.kv_kinds.window import WindowKind

FULL = KVGroupSpec("full", "full", 4, 64)


def kind_of(group: KVGroupSpec) -> KVKind:
    """The rules of a group, without the registry."""
    if group.kind == "full":
        return FullKind(group.block_size)
    return WindowKind(group.block_size, group.options["window"])


class Rig:
    """Everything of one engine: `clock`, `scheduler`, `device`, `engine`.

    `blocks` sizes the pool of one group in blocks (the null block comes on top); `pool_bytes`
    sizes any pool.
    """

    def __init__(
        self,
        *,
        groups: Sequence[KVGroupSpec] = (FULL,),
        blocks: int = 64,
        pool_bytes: int = 0,
        max_model_len: int = 64,
        max_slots: int = 8,
        in_flight: int = 1,
        constraints: Sequence[Any] = (),
        draft_budget: Callable[[Request], int] | None = None,
        speculator: Any = None,
        k: int = 3,
        adaptive: bool = False,
        fatal: bool = False,
        **numbers: Any,
    ) -> None:
        pool = pool_bytes or (blocks + 1) * groups[0].page_bytes
        numbers.setdefault("max_num_batched_tokens", 32)
        numbers.setdefault("max_num_seqs", 8)
        numbers.setdefault("steps_in_flight", in_flight)
        config = SchedulerConfig(max_model_len=max_model_len, **numbers)
        capacity = KVCapacity(tuple(groups), pool, max_slots, max_model_len)
        self.clock = VirtualClock()
        self.plans: list[StepPlan] = []
        self.device = FakeDevice(capacity, self.clock, Random(0), in_flight, self.plans.append)
        self.drafter: Drafter | None = None
        if speculator is not None:
            policy = DraftPolicy(k, adaptive)
            self.drafter = Drafter(speculator, "fake", policy, VOCAB, fatal, self.clock)
        self.scheduler = Scheduler(
            config,
            capacity,
            [kind_of(g) for g in groups],
            self.clock,
            constraints,
            draft_budget,
            self.drafter,
        )
        self.engine = Engine(self.scheduler, self.device, self.clock)
        self.outputs: list[TokenOutput] = []

    def add(
        self, name: str, prompt: Sequence[int] | int, max_tokens: int | None = 4, **more: Any
    ) -> Request:
        """Queue a request; an integer prompt is that many distinct tokens."""
        fields = {k: more.pop(k) for k in ("priority", "root_key", "seed") if k in more}
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
        more.setdefault("ignore_eos", True)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=max_tokens, **more),
            eos_token_ids=(0,),
            arrival_s=self.clock.now,
            **fields,
        )
        self.engine.add_request(request)
        return request

    def step(self, times: int = 1) -> list[TokenOutput]:
        """Engine steps; their outputs."""
        new: list[TokenOutput] = []
        for _ in range(times):
            new += self.engine.step()
        self.outputs += new
        return new

    def run(self, limit: int = 2000) -> dict[str, list[int]]:
        """Step until nothing is left; all tokens by request."""
        while self.engine.has_work():
            limit -= 1
            assert limit > 0, "the engine does not come to an end"
            self.step()
        return self.tokens()

    def tokens(self) -> dict[str, list[int]]:
        """All tokens given out so far, by request."""
        found: dict[str, list[int]] = {}
        for output in self.outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        return found

    def endings(self) -> dict[str, str]:
        """Finish reason by request; fails if a request has two."""
        found: dict[str, str] = {}
        for output in self.outputs:
            if output.finish_reason is not None:
                assert output.request_id not in found
                found[output.request_id] = output.finish_reason.value
        return found
