"""What the kernel ring remembers of one live request. Written by the scheduler and outputs only.

The numbers that change at every step of a running request (computed and known tokens) live in the
scheduler's slot table as arrays; here is what changes rarely, and the tokens themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cardcage.core.types import FinishReason, Request, RequestStatus, TokenLogprob


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One request from arrival to its terminal event.

    Invariants: `slot >= 0` exactly while RUNNING; blocks are held exactly while RUNNING;
    `tokens` holds prompt and delivered outputs, never a token that a client has not been given.
    """

    request: Request
    key: tuple[int, int]  # policy order, smaller first: (priority or 0, arrival number)
    max_len: int  # prompt + outputs at which the request ends with reason "length"
    stops: frozenset[int]  # tokens that may end it
    num_groups: int
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    block_ids: list[list[int]] = field(init=False)  # per group, by logical block; 0 = freed
    num_released: list[int] = field(init=False)  # per group: leading blocks already given back
    num_keyed: list[int] = field(init=False)  # per group: leading blocks offered to the cache
    prefix_keys: list[bytes] = field(default_factory=list)
    root: bytes = b""
    num_cached: int | None = None  # prefix hit at the first admission, in tokens
    num_preemptions: int = 0
    alone: bool = False  # ran out of memory as the only request: runs next without company
    park_reason: str | None = None
    park_ticket: int = 0  # tells a deadline whether its parking is still the current one
    blocked_at: int = -1  # pool.num_frees when it last did not fit
    bypassed_since_s: float | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = field(init=False)
    num_prompt_logprobs: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        wanted = self.request.params.prompt_logprobs is not None
        self.prompt_logprobs = [None] * self.prompt_len if wanted else None
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """Start again with no blocks (they have been given back)."""
        self.block_ids = [[] for _ in range(self.num_groups)]
        self.num_released = [0] * self.num_groups
        self.num_keyed = [0] * self.num_groups

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scores_only(self) -> bool:
        """max_tokens = 0: the prompt is computed (and perhaps scored), nothing is sampled."""
        return self.max_len == self.prompt_len

    @property
    def needs_whole_prompt(self) -> bool:
        """Prompt logprobs are still missing, so no prefix may come from the cache."""
        return self.prompt_logprobs is not None and self.num_prompt_logprobs < self.prompt_len - 1
