"""Which logits rows of a step need which stage of the sampler: host work, made before the step.

Lists of token ids lie in the arena of the batch state; a plan holds, per stage, the rows and
where their lists are. Everything that the device needs travels in `uploads`, with the other
arrays of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cardcage.core.contracts import LogitsPlugin
from cardcage.core.runtime.batch import BatchState, Slot
from cardcage.core.runtime.layout import Int64, Layout
from cardcage.core.runtime.slot_params import Feature


@dataclass(slots=True)
class SamplePlan:
    """Which logits rows need what, as host arrays. `union` is the OR of all rows' features.

    `uploads` are int64 index arrays that go to the device with the step's other arrays:
    `slot`, `position` [N] and per stage what its method below reads.
    """

    num: int
    union: Feature
    uploads: dict[str, NDArray[Any]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    longest_word: int = 0
    plugin_rows: dict[int, Int64] = field(default_factory=dict)
    logprob_rows: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    logprob_top: int = 0
    slots: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    positions: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    local: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    # A captured step has no lists of rows: the parameter table says which rows are random.
    from_table: bool = False


class Planner:
    """Makes the `SamplePlan` of one step from the batch state and the step's rows."""

    def __init__(self, batch: BatchState, layout: Layout) -> None:
        self.batch = batch
        self.layout = layout

    def plan(self, plugins: Sequence[LogitsPlugin], wants: Sequence[set[int]]) -> SamplePlan:
        """The finished plan. `wants[i]` are the slots that plugin i cares for."""
        layout = self.layout
        slots = layout.slots[layout.row]
        bits = self.batch.features[slots]
        union = Feature(int(np.bitwise_or.reduce(bits, initial=0)))
        plan = SamplePlan(len(slots), union)
        plan.slots, plan.positions, plan.local = slots, layout.position, layout.local
        plan.uploads = {"slot": slots, "position": layout.position}
        random = np.flatnonzero(bits & Feature.RANDOM)
        if 0 < len(random) < len(slots):
            plan.uploads["random"] = random
        for feature, build in (
            (Feature.ALLOWED, self._allowed),
            (Feature.BIAS, self._bias),
            (Feature.MIN_TOKENS, self._min_tokens),
            (Feature.PENALTY, self._penalties),
            (Feature.BAD_WORDS, self._bad_words),
        ):
            if union & feature:
                build(plan, np.flatnonzero(bits & feature))
        if union & Feature.PLUGIN:
            self._plugins(plan, plugins, wants)
        if union & Feature.LOGPROBS:
            plan.logprob_rows = np.flatnonzero(bits & Feature.LOGPROBS)
            plan.uploads["logprob"] = plan.logprob_rows
            plan.logprob_top = max(top_of(self.batch, int(s)) for s in slots[plan.logprob_rows])
        return plan

    def _ragged(self, plan: SamplePlan, name: str, rows: Int64, list_name: str) -> None:
        """Upload (row, offset, length) of each row's list in the arena."""
        extents = [self._slot(plan, row).lists[list_name] for row in rows]
        self._put_ragged(plan, name, rows, extents)

    def _put_ragged(
        self, plan: SamplePlan, name: str, rows: Int64, extents: Sequence[tuple[int, int]]
    ) -> None:
        pairs = np.array(extents, np.int64).reshape(-1, 2)
        plan.uploads[f"{name}_row"] = rows
        plan.uploads[f"{name}_at"] = np.ascontiguousarray(pairs[:, 0])
        plan.uploads[f"{name}_len"] = np.ascontiguousarray(pairs[:, 1])
        plan.totals[name] = int(pairs[:, 1].sum())

    def _slot(self, plan: SamplePlan, row: int) -> Slot:
        slot = self.batch.slots[int(plan.slots[row])]
        assert slot is not None  # rows of empty slots have no features
        return slot

    def _allowed(self, plan: SamplePlan, rows: Int64) -> None:
        plan.uploads["allowed_rows"] = rows
        self._ragged(plan, "allowed", rows, "allowed")

    def _bias(self, plan: SamplePlan, rows: Int64) -> None:
        self._ragged(plan, "bias", rows, "bias")
        values = [self._slot(plan, row).lists["bias_values"][0] for row in rows]
        plan.uploads["bias_values_at"] = np.array(values, np.int64)

    def _min_tokens(self, plan: SamplePlan, rows: Int64) -> None:
        def early(row: int) -> bool:
            slot = self._slot(plan, row)
            return bool(plan.positions[row] + 1 < slot.prompt_len + slot.params.min_tokens)

        rows = np.array([row for row in rows if early(row)], np.int64)
        if len(rows):
            self._ragged(plan, "stop", rows, "stop")

    def _penalties(self, plan: SamplePlan, rows: Int64) -> None:
        plan.uploads["penalty_rows"] = rows
        drafted = np.flatnonzero(plan.local[rows])
        if len(drafted):
            # Drafts 1..local of a row are its last `local` known tokens.
            owner = rows[drafted]
            local = plan.local[owner]
            at = plan.slots[owner] * self.batch.width + plan.positions[owner] - local + 1
            self._put_ragged(plan, "drafted", drafted, list(zip(at, local)))

    def _bad_words(self, plan: SamplePlan, rows: Int64) -> None:
        owners, words = [], []
        for row in rows:
            for word in self._slot(plan, row).bad_words:
                owners.append(row)
                words.append(word)
        pairs = np.array(words, np.int64)
        plan.uploads["word_row"] = np.array(owners, np.int64)
        plan.uploads["word_at"] = np.ascontiguousarray(pairs[:, 0])
        plan.uploads["word_len"] = np.ascontiguousarray(pairs[:, 1])
        plan.longest_word = int(pairs[:, 1].max())

    def _plugins(
        self, plan: SamplePlan, plugins: Sequence[LogitsPlugin], wants: Sequence[set[int]]
    ) -> None:
        for index, (plugin, wanted) in enumerate(zip(plugins, wants)):
            skip_greedy = plugin.argmax_invariant
            chosen = [
                row
                for row, slot in enumerate(plan.slots)
                if slot in wanted
                and not (skip_greedy and not self.batch.features[slot] & Feature.RANDOM)
            ]
            if chosen:
                plan.plugin_rows[index] = np.array(chosen, np.int64)
                plan.uploads[f"plugin{index}"] = plan.plugin_rows[index]
                plan.uploads[f"plugin{index}_local"] = plan.local[chosen]


def top_of(batch: BatchState, index: int) -> int:
    """How many alternatives the request in a slot wants; -1 in its parameters means all."""
    slot = batch.slots[index]
    wanted = 0 if slot is None or slot.params.logprobs is None else slot.params.logprobs
    return batch.vocab_size if wanted < 0 else min(wanted, batch.vocab_size)
