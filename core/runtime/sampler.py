"""From logits to token ids: constraints, shaping, truncation, draw, in one fixed order.

Stages, each a function of (a row's request, a row's history, its logits) alone: 3 allowed ids,
4 logit bias, 5 min_tokens, 6 penalties, 7 bad words, 9 plugins (by their own order), 10
temperature, 11 min_p, 12 top-k then top-p, 13 draw. `SamplePlan` is made on the host and says
which rows need which stage; rows that need none are not touched. A logits row may follow drafts
of its request: its history is the committed tokens and those drafts. No host sync.

Source: spec/sampling_watermark.md 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cardcage.core.contracts import LogitsPlugin, SampleRows
from cardcage.core.runtime import slot_params as tables
from cardcage.core.runtime.batch import BatchState, spread
from cardcage.core.runtime.layout import Layout
from cardcage.core.runtime.logprobs import LogprobRows, score
from cardcage.core.runtime.rng import draw, draw_rows, first_argmax, on_threads
from cardcage.core.runtime.sample_plan import Planner, SamplePlan
from cardcage.core.runtime.slot_params import Feature
from cardcage.core.runtime.truncate import row_threshold, thresholds

# Features of a request that edit its logits one by one: everything between 3 and 9.
EDITS = (
    Feature.ALLOWED
    | Feature.BIAS
    | Feature.MIN_TOKENS
    | Feature.PENALTY
    | Feature.BAD_WORDS
    | Feature.PLUGIN
)
SHAPING = Feature.TEMPERATURE | Feature.MIN_P | Feature.TRUNCATE
# What a captured graph may contain: stages that need the parameter table and nothing else.
CAPTURABLE = Feature.RANDOM | SHAPING
FINE, NOTHING_LEFT, NOT_A_NUMBER = 0, 1, 2
PROBLEMS = {
    NOTHING_LEFT: "no token is left to choose from: the request's constraints exclude all",
    NOT_A_NUMBER: "the model produced NaN or infinite logits",
}


@dataclass(slots=True)
class Sampled:
    """Per logits row: the token (int64 [N]), whether it is valid (int32 [N], 0 = fine), and
    log-probabilities of the rows that asked for them."""

    tokens: torch.Tensor
    status: torch.Tensor
    logprobs: LogprobRows | None = None


Dev = dict[str, torch.Tensor]
Stage = Callable[[torch.Tensor, SamplePlan, Dev], torch.Tensor]


class Sampler:
    """Runs the pipeline on one batch state.

    Args:
        plugins: logits plugins.
        logprobs_mode: raw_logprobs, processed_logprobs, raw_logits or processed_logits.
    """

    def __init__(
        self,
        batch: BatchState,
        plugins: Sequence[LogitsPlugin] = (),
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.batch = batch
        self.plugins = list(plugins)
        self.processed = logprobs_mode.startswith("processed")
        self.normalize = logprobs_mode.endswith("logprobs")
        self._wants: list[set[int]] = [set() for _ in self.plugins]
        stages: list[tuple[float, Feature, Stage]] = [
            (3, Feature.ALLOWED, self._allowed),
            (4, Feature.BIAS, self._bias),
            (5, Feature.MIN_TOKENS, self._min_tokens),
            (6, Feature.PENALTY, self._penalties),
            (7, Feature.BAD_WORDS, self._bad_words),
            (10, Feature.TEMPERATURE, self._temperature),
            (11, Feature.MIN_P, self._min_p),
            (12, Feature.TRUNCATE, self._truncate),
        ]
        for index, plugin in enumerate(self.plugins):
            stages.append((plugin.order, Feature.PLUGIN, self._plugin_stage(index)))
        self._stages = sorted(stages, key=lambda stage: stage[0])

    # -- host side -------------------------------------------------------------------------

    def admit(self, index: int, prompt_ids: Sequence[int]) -> None:
        """Ask the plugins whether they care for the request that took a slot."""
        slot = self.batch.slots[index]
        if slot is None or slot.error is not None:
            return
        for plugin, wants in zip(self.plugins, self._wants):
            slot.error = slot.error or plugin.validate(slot.params)
            self.batch.sound[index] = slot.error is None
            if slot.error is None and plugin.admit(index, slot.params, prompt_ids):
                wants.add(index)
                self.batch.features[index] |= Feature.PLUGIN

    def release(self, index: int) -> None:
        """The request in a slot is gone."""
        for plugin, wants in zip(self.plugins, self._wants):
            if index in wants:
                wants.discard(index)
                plugin.release(index)

    def reset(self) -> None:
        """Every slot is gone."""
        for index in range(self.batch.num_slots):
            self.release(index)

    def plan(self, layout: Layout) -> SamplePlan:
        """Sort the logits rows of a step by what they need. Host only."""
        return Planner(self.batch, layout).plan(self.plugins, self._wants)

    # -- device side -----------------------------------------------------------------------

    def __call__(self, logits: torch.Tensor, plan: SamplePlan, dev: Dev) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: [N, V] in the model's dtype; never changed.
            plan: what the rows need.
            dev: the plan's uploads on the device.
        """
        union = plan.union
        z = logits
        by_row = self._by_row(plan, logits)
        if union & EDITS or (union & SHAPING and not by_row):
            z = logits.to(torch.float32, copy=True)
        elif union & Feature.RANDOM:
            z = logits.to(torch.float32)
        for _, feature, stage in self._stages:
            if union & feature and not (by_row and feature & SHAPING):
                z = stage(z, plan, dev)
        tokens = first_argmax(z)
        best = z.gather(1, tokens[:, None])[:, 0]
        status = torch.where(torch.isfinite(best), FINE, NOT_A_NUMBER)
        status = torch.where(torch.isneginf(best), NOTHING_LEFT, status).to(torch.int32)
        if by_row:
            self._shape_and_draw(z, tokens, plan)
        elif union & Feature.RANDOM:
            tokens = self._draw(z, tokens, plan, dev)
        sampled = Sampled(tokens, status)
        if len(plan.logprob_rows):
            rows = dev["logprob"]
            shown = (z if self.processed else logits)[rows].to(torch.float32)
            sampled.logprobs = score(shown, tokens[rows], plan.logprob_top, self.normalize)
        return sampled

    def _draw(
        self, z: torch.Tensor, greedy: torch.Tensor, plan: SamplePlan, dev: Dev
    ) -> torch.Tensor:
        slot, position = dev["slot"], dev["position"]
        seeds = self.batch.params.view(torch.int64)[:, tables.SEED // 2]
        if "random" in dev:
            rows = dev["random"]
            drawn = draw(z[rows], seeds[slot[rows]], position[rows])
            return greedy.index_copy(0, rows, drawn)
        drawn = draw(z, seeds[slot], position)
        if plan.from_table:
            return torch.where(self._float(tables.TEMPERATURE, slot) > 0.0, drawn, greedy)
        return drawn

    def _by_row(self, plan: SamplePlan, logits: torch.Tensor) -> bool:
        """Whether stages 10 to 13 run row by row in host memory, without masking whole rows."""
        late = any(plugin.order >= 10 for plugin in self.plugins)
        shown = self.processed and len(plan.logprob_rows) > 0
        host = logits.device.type == "cpu" and not plan.from_table
        return bool(plan.union & Feature.RANDOM) and host and not late and not shown

    def _shape_and_draw(self, z: torch.Tensor, tokens: torch.Tensor, plan: SamplePlan) -> None:
        """Stages 10 to 13 of the random rows, writing into `tokens`: z float32 [N, V] is kept."""
        rows, table = z.numpy(), self.batch.params.numpy()
        random = plan.uploads.get("random", np.arange(plan.num))
        words = table[plan.slots[random]]
        floats, seeds = words.view(np.float32), words.view(np.int64)[:, tables.SEED // 2]

        def shape(i: int) -> tuple[NDArray[np.float32], float]:
            row, low = rows[random[i]], -np.inf
            if floats[i, tables.TEMPERATURE] != 1.0:
                row = row / floats[i, tables.TEMPERATURE]
            if floats[i, tables.MIN_P] > 0.0:
                low = float(row.max() + np.log(floats[i, tables.MIN_P]))
            k, p = int(words[i, tables.TOP_K]), float(floats[i, tables.TOP_P])
            return row, row_threshold(row, k, p, low)

        shaped = on_threads(shape, range(len(random)))
        drawn = draw_rows(
            [row for row, _ in shaped], [low for _, low in shaped], seeds, plan.positions[random]
        )
        tokens.numpy()[random] = drawn

    def _float(self, column: int, slot: torch.Tensor) -> torch.Tensor:
        return self.batch.params.view(torch.float32)[:, column][slot]

    def _int(self, column: int, slot: torch.Tensor) -> torch.Tensor:
        return self.batch.params[:, column][slot]

    def _entries(self, plan: SamplePlan, dev: Dev, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits row, index in the buffer that the list lies in) of every entry of a list."""
        lens, total = dev[f"{name}_len"], plan.totals[name]
        rows = torch.repeat_interleave(dev[f"{name}_row"], lens, output_size=total)
        return rows, spread(dev[f"{name}_at"], lens, total)

    def _allowed(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        rows, at = self._entries(plan, dev, "allowed")
        ids = self.batch.arena[at].to(torch.int64)
        kept = z[rows, ids]
        z.index_fill_(0, dev["allowed_rows"], -torch.inf)
        return z.index_put_((rows, ids), kept)

    def _bias(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        rows, at = self._entries(plan, dev, "bias")
        ids = self.batch.arena[at].to(torch.int64)
        values_at = spread(dev["bias_values_at"], dev["bias_len"], plan.totals["bias"])
        values = self.batch.arena.view(torch.float32)[values_at]
        return z.index_put_((rows, ids), z[rows, ids] + values)

    def _min_tokens(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        if "stop" not in plan.totals:
            return z
        rows, at = self._entries(plan, dev, "stop")
        ids = self.batch.arena[at].to(torch.int64)
        return z.index_put_((rows, ids), torch.full_like(rows, -torch.inf, dtype=z.dtype))

    def _penalties(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        rows = dev["penalty_rows"]
        slot = dev["slot"][rows]
        counts = self.batch.counts[self._int(tables.PENALTY_ROW, slot).to(torch.int64)]
        if "drafted" in plan.totals:
            owner, at = self._entries(plan, dev, "drafted")
            ids = self.batch.legal(self.batch.words[at].to(torch.int64))
            ones = torch.ones_like(owner, dtype=torch.int32)
            counts.index_put_((owner, ids), ones, accumulate=True)
        repetition = self._float(tables.REPETITION, slot)[:, None]
        frequency = self._float(tables.FREQUENCY, slot)[:, None]
        presence = self._float(tables.PRESENCE, slot)[:, None]
        if z.device.type == "cpu":
            for i, row in enumerate(rows.tolist()):
                params = (float(t[i, 0]) for t in (repetition, frequency, presence))
                _penalize_row(z[row].numpy(), counts[i].numpy(), *params)
            return z
        x = z[rows]
        punished = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(counts > 0, punished, x)
        output = counts & (tables.IN_PROMPT - 1)
        x = torch.where(output > 0, x - frequency * output - presence, x)
        return z.index_copy_(0, rows, x)

    def _bad_words(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        """A word's last id is banned where the ids before it are the newest outputs."""
        row, at, length = dev["word_row"], dev["word_at"], dev["word_len"]
        slot, position = dev["slot"][row], dev["position"][row]
        arena, tokens = self.batch.arena, self.batch.tokens
        banned = torch.ones_like(row, dtype=torch.bool)
        first_output = self._int(tables.PROMPT_LEN, slot)
        # Step `back` compares the id that far before the word's last with the history.
        for back in range(1, plan.longest_word):
            inside = back < length
            place = position + 1 - back
            wanted = arena[(at + length - 1 - back).clamp_(min=0)]
            same = (tokens[slot, place.clamp(min=0)] == wanted) & (place >= first_output)
            banned &= same | ~inside
        ids = arena[at + length - 1].to(torch.int64)
        # Adding -inf or 0 stays right when two words end in the same id.
        amount = torch.where(banned, -torch.inf, 0.0)
        return z.index_put_((row, ids), amount, accumulate=True)

    def _plugin_stage(self, index: int) -> Stage:
        def stage(z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
            if index not in plan.plugin_rows:
                return z
            rows, host = dev[f"plugin{index}"], plan.plugin_rows[index]
            slots, ends = plan.slots[host], plan.positions[host] + 1

            def history(i: int) -> torch.Tensor:
                return self.batch.tokens[int(slots[i]), : int(ends[i])]

            local, position = dev[f"plugin{index}_local"], dev["position"][rows]
            view = SampleRows(dev["slot"][rows], local, position, history)
            part = z[rows]
            self.plugins[index].apply(part, view)
            return z.index_copy_(0, rows, part)

        return stage

    def _temperature(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        temperature = self._float(tables.TEMPERATURE, dev["slot"])
        return z.div_(torch.where(temperature > 0.0, temperature, 1.0)[:, None])

    def _min_p(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        bound = z.amax(dim=-1) + self._float(tables.MIN_P, dev["slot"]).log()
        return z.masked_fill_(z < bound[:, None], -torch.inf)

    def _truncate(self, z: torch.Tensor, plan: SamplePlan, dev: Dev) -> torch.Tensor:
        slot = dev["slot"]
        top_k, top_p = self._int(tables.TOP_K, slot), self._float(tables.TOP_P, slot)
        return z.masked_fill_(z < thresholds(z, top_k, top_p)[:, None], -torch.inf)


def _penalize_row(
    z: NDArray[np.float32],
    counts: NDArray[np.int32],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """`Sampler._penalties` of one row in host memory, in place: only ids that occurred."""
    ids = np.flatnonzero(counts)
    x, output = z[ids], counts[ids] & (tables.IN_PROMPT - 1)
    x = np.where(x > 0, x / np.float32(repetition), x * np.float32(repetition))
    cost = np.float32(frequency) * output.astype(np.float32)
    z[ids] = np.where(output > 0, x - cost - np.float32(presence), x)
