"""The rows of a step on the host: which tokens and which logits rows belong to which request.

Drafts only add rows to this one layout, so samplers, penalties and plugins work with them by
construction. Pure numpy: no tensor is touched here.

Source: spec/speculation.md 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cardcage.core.errors import ExecutionError
from cardcage.core.types import StepPlan

Int64 = NDArray[np.int64]


@dataclass(slots=True)
class Layout:
    """The rows of one step on the host . All index arrays are int64.

    R rows of the plan, T tokens, N logits rows. Row `sampled[i]` of the plan owns the logits rows
    [first[i], first[i] + drafts[i] + 1). `token_index` is a logits row's place among the tokens.
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    query_lens: list[int]
    seq_lens: list[int]
    slots: Int64
    starts: Int64
    query_start: Int64  # [R + 1]
    sampled: Int64
    drafts: Int64
    first: Int64
    row: Int64  # [N] plan row of a logits row
    local: Int64
    token_index: Int64
    position: Int64
    max_drafts: int

    @property
    def num_logits(self) -> int:
        return len(self.row)

    @property
    def uniform(self) -> bool:
        """One token in every row, and every row is sampled: the shape that graphs replay."""
        return self.num_tokens == self.num_rows == self.num_logits


def layout_of(plan: StepPlan) -> Layout:
    """Where the tokens and the logits rows of a plan lie."""
    lens = plan.num_tokens.astype(np.int64)
    starts = plan.starts.astype(np.int64)
    query_start = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=query_start[1:])
    sampled = np.flatnonzero(plan.samples)
    drafts = plan.num_drafts[sampled].astype(np.int64)
    if np.any(drafts >= lens[sampled]):
        raise ExecutionError("a plan row has as many drafts as tokens; it needs one more token")
    counts = drafts + 1
    first = np.cumsum(counts) - counts
    row = np.repeat(sampled, counts)
    local = np.arange(len(row)) - np.repeat(first, counts)
    back = np.repeat(drafts, counts) - local  # rows left until the last one of the request
    many = np.flatnonzero(lens != 1)
    return Layout(
        num_rows=len(lens),
        num_tokens=int(query_start[-1]),
        num_decodes=int(many[0]) if len(many) else len(lens),
        query_lens=lens.tolist(),
        seq_lens=(starts + lens).tolist(),
        slots=plan.slots.astype(np.int64),
        starts=starts,
        query_start=query_start,
        sampled=sampled,
        drafts=drafts,
        first=first,
        row=row,
        local=local,
        token_index=query_start[row + 1] - 1 - back,
        position=(starts + lens)[row] - 1 - back,
        max_drafts=int(drafts.max(initial=0)),
    )
