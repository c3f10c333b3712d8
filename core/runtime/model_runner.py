"""One step on a device: deltas, inputs, attention plans, forward, logits, sample, commit.

`prepare` is host work and may run while an earlier step is under way; `run` launches device
work in order and never waits for it. Sampled tokens are written into the token table by the
step itself, so the next step can be launched before the host has seen them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cardcage.core.contracts import KVPart
from cardcage.core.runtime.batch import BatchState, Deltas, StepInputs
from cardcage.core.runtime.kv_pool import KVPool
from cardcage.core.runtime.layers import ModelInput
from cardcage.core.runtime.layout import Layout, layout_of
from cardcage.core.runtime.logprobs import LogprobRows, parse, score
from cardcage.core.runtime.sample_plan import SamplePlan, top_of
from cardcage.core.runtime.sampler import PROBLEMS, Sampled, Sampler
from cardcage.core.runtime.slot_params import PENALTY_ROW, Feature
from cardcage.core.runtime.staging import Download, Uploader
from cardcage.core.types import KVGroupSpec, StepPlan, StepResult, TokenLogprob

# Prompt rows whose logits exist at one time: 1024 rows of 50,000 float32 logits are 200 MB.
_PROMPT_CHUNK = 1024


class RunnerModel(Protocol):
    """What the runner needs of a model; `core.runtime.model.Model` is one."""

    attention_keys: list[Any]
    attention_layers: list[Any]

    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...
    def kv_offsets(self) -> Sequence[Sequence[tuple[KVPart, int]]]: ...
    def forward(self, inp: ModelInput) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class PromptRows:
    """Prompt positions of one plan row whose next token is known: `count` from token `first`."""

    row: int
    first: int
    count: int
    top: int


@dataclass(slots=True)
class Prepared:
    """Everything that the host knows of a step before it runs."""

    step: int
    layout: Layout
    deltas: Deltas
    sampling: SamplePlan
    uploads: dict[str, NDArray[Any]]
    errors: dict[int, str]
    logprob_top: dict[int, int] = field(default_factory=dict)
    prompts: list[PromptRows] = field(default_factory=list)


@dataclass(slots=True)
class Verified:
    """What a step emits, on the device: tokens int32 [Rs, 1 + D], counts and status int32 [Rs]."""

    tokens: torch.Tensor
    counts: torch.Tensor
    status: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.tokens, self.counts, self.status]


@dataclass(slots=True)
class Replayed:
    """What a replayed graph left: committed tokens, or logits still to be sampled."""

    verified: Verified | None = None
    logits: torch.Tensor | None = None


class StepHandle:
    """A launched step. `result` waits for its arrays and turns them into a `StepResult`."""

    def __init__(self, prepared: Prepared, download: Download, parts: list[int]) -> None:
        self._prepared = prepared
        self._download = download
        self._parts = parts  # arrays of: verified tokens, logprobs, each prompt chunk
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self._download.done()

    def result(self) -> StepResult:
        """Blocks until the step's arrays are on the host."""
        if self._result is None:
            self._result = self._collect(self._download.wait())
        return self._result

    def _collect(self, arrays: list[NDArray[Any]]) -> StepResult:
        prepared, layout = self._prepared, self._prepared.layout
        num, width = layout.num_rows, 1 + layout.max_drafts
        result = StepResult(
            prepared.step,
            np.zeros((num, width), np.int32),
            np.zeros(num, np.int32),
            np.zeros(num, np.int32),
            errors=dict(prepared.errors),
        )
        if len(layout.sampled):
            tokens, counts, status = arrays[:3]
            result.token_ids[layout.sampled] = tokens
            result.counts[layout.sampled] = counts
            result.rejected[layout.sampled] = np.maximum(layout.drafts + 1 - counts, 0)
            for i in np.flatnonzero(status):
                result.errors.setdefault(int(layout.sampled[i]), PROBLEMS[int(status[i])])
        for row in result.errors:
            result.counts[row] = 0
        at = 3 if len(layout.sampled) else 0
        self._collect_logprobs(result, arrays, at)
        return result

    def _collect_logprobs(self, result: StepResult, arrays: list[NDArray[Any]], at: int) -> None:
        prepared, layout = self._prepared, self._prepared.layout
        wanted = prepared.sampling.logprob_rows
        if len(wanted):
            ids, values = arrays[at], arrays[at + 1 : at + 5]
            at += 5
            for i, logits_row in enumerate(wanted):
                row = int(layout.row[logits_row])
                if layout.local[logits_row] < result.counts[row]:
                    entry = parse(ids, values, i, prepared.logprob_top[row])
                    result.logprobs.setdefault(row, []).append(entry)
        for prompt, chunks in zip(prepared.prompts, self._parts):
            entries: list[TokenLogprob] = []
            for _ in range(chunks):
                ids, values = arrays[at], arrays[at + 1 : at + 5]
                at += 5
                entries += [parse(ids, values, i, prompt.top) for i in range(len(ids))]
            result.prompt_logprobs[prompt.row] = entries


class ModelRunner:
    """Holds the batch state, the pool's views and the sampler of one model on one device.

    Args:
        model: loaded; its attention layers' caches are set here.
        pool: the block pool.
        batch: tables for the same groups as the model's.
        stream: side stream for downloads; None on hosts.
        depth: staging buffers, steps in flight plus one.
    """

    def __init__(
        self,
        model: RunnerModel,
        pool: KVPool,
        batch: BatchState,
        sampler: Sampler,
        stream: torch.Stream | None = None,
        depth: int = 3,
    ) -> None:
        self.model = model
        self.pool = pool
        self.batch = batch
        self.sampler = sampler
        self._stream = stream
        self._upload = Uploader(batch.device, depth)
        # Set by `graphs.GraphRunner`: runs a uniform step by replay, or answers None.
        self.replay: Callable[[Prepared, dict[str, torch.Tensor]], Replayed | None] | None = None
        bind_caches(model, pool)

    def reset(self) -> None:
        """Forget all slots; weights and pool stay."""
        self.sampler.reset()
        self.batch.reset()

    # -- host side -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> Prepared:
        """Take in a plan. Host only, and nothing of the plan is kept."""
        for index in plan.releases:
            self.sampler.release(index)
        deltas = self.batch.prepare(plan)
        for admit in plan.admits:
            self.sampler.admit(admit.slot, admit.token_ids[: admit.prompt_len])
        layout = layout_of(plan)
        sampling = self.sampler.plan(layout)
        prepared = Prepared(plan.step, layout, deltas, sampling, {}, {})
        uploads = prepared.uploads
        uploads.update(deltas.uploads)
        uploads.update(sampling.uploads)
        uploads["slots"], uploads["starts"] = layout.slots, layout.starts
        if layout.num_tokens != layout.num_rows:
            uploads["query_start"] = layout.query_start
        if layout.num_logits != layout.num_tokens:
            uploads["token_index"] = layout.token_index
        if layout.max_drafts:
            uploads["first"], uploads["drafts"] = layout.first, layout.drafts
        self._prepare_blocks(deltas, uploads)
        self._prepare_rows(prepared)
        return prepared

    def _prepare_blocks(self, deltas: Deltas, uploads: dict[str, NDArray[Any]]) -> None:
        for i, (_, blocks) in enumerate(deltas.zero_blocks):
            uploads[f"zero{i}"] = np.asarray(blocks, np.int64)
        for group in {group for group, _, _ in deltas.copies}:
            pairs = np.array([c[1:] for c in deltas.copies if c[0] == group], np.int64)
            uploads[f"copy{group}"] = np.ascontiguousarray(pairs.T)

    def _prepare_rows(self, prepared: Prepared) -> None:
        """Errors, and what log-probabilities each row of the plan wants."""
        layout, batch = prepared.layout, self.batch
        bits = batch.features[layout.slots] & (Feature.LOGPROBS | Feature.PROMPT_LOGPROBS)
        for row in np.flatnonzero((bits != 0) | ~batch.sound[layout.slots]).tolist():
            index = int(layout.slots[row])
            slot = batch.slots[index] if index < batch.num_slots else None
            if slot is None:
                prepared.errors[row] = f"slot {index} holds no request"
            elif slot.error is not None:
                prepared.errors[row] = slot.error
            else:
                if bits[row] & Feature.LOGPROBS:
                    prepared.logprob_top[row] = top_of(batch, index)
                top = slot.params.prompt_logprobs
                known = min(layout.seq_lens[row], slot.prompt_len - 1) - int(layout.starts[row])
                if top is not None and known > 0:
                    top = batch.vocab_size if top < 0 else min(top, batch.vocab_size)
                    first = int(layout.query_start[row])
                    prepared.prompts.append(PromptRows(row, first, known, top))

    # -- device side -----------------------------------------------------------------------

    def step(self, plan: StepPlan) -> StepHandle:
        """`prepare` and `run` in one call."""
        return self.run(self.prepare(plan))

    @torch.inference_mode()
    def run(self, prepared: Prepared) -> StepHandle:
        """Launch a prepared step. Steps run in the order of these calls."""
        layout, sampling = prepared.layout, prepared.sampling
        dev = self._upload(prepared.uploads)
        self._apply(prepared.deltas, dev)
        if layout.num_rows == 0:
            return StepHandle(prepared, Download([], self._stream), [])
        prompts: list[list[torch.Tensor]] = []
        replayed = self.replay(prepared, dev) if self.replay is not None else None
        if replayed is None:
            hidden = self.forward(self.batch.build_inputs(layout, dev))
            prompts = [self._score_prompt(hidden, rows, layout) for rows in prepared.prompts]
            logits = self._logits(hidden, sampling, dev)
        else:
            logits = replayed.logits
        out: list[torch.Tensor] = []
        if logits is not None:
            sampled = self.sampler(logits, sampling, dev)
            verified = self._verify(sampled, layout, dev)
            self._commit(verified, layout, dev, sampling)
            out = verified.tensors()
            if sampled.logprobs is not None:
                out += [sampled.tokens[dev["logprob"]], *sampled.logprobs.tensors()]
        elif replayed is not None and replayed.verified is not None:
            out = replayed.verified.tensors()
        for chunks in prompts:
            out.extend(chunks)
        parts = [len(chunks) // 5 for chunks in prompts]
        return StepHandle(prepared, Download(out, self._stream), parts)

    def _apply(self, deltas: Deltas, dev: dict[str, torch.Tensor]) -> None:
        self.batch.apply(deltas, dev)
        for i, (group, _) in enumerate(deltas.zero_blocks):
            self.pool.zero(group, dev[f"zero{i}"])
        for group in {group for group, _, _ in deltas.copies}:
            source, target = dev[f"copy{group}"]
            self.pool.copy(group, source, target)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Plan attention once per distinct need, then run the model: hidden states [T, hidden]."""
        plans = [key.backend.plan(inputs.metas[key.group]) for key in self.model.attention_keys]
        return self.model.forward(ModelInput(inputs.input_ids, inputs.positions, plans))

    def _logits(
        self, hidden: torch.Tensor, plan: SamplePlan, dev: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Logits of the rows that sample; None if no row does."""
        if plan.num == 0:
            return None
        if "token_index" in dev:
            hidden = hidden.index_select(0, dev["token_index"])
        return self.model.logits(hidden)

    def _score_prompt(
        self, hidden: torch.Tensor, rows: PromptRows, layout: Layout
    ) -> list[torch.Tensor]:
        """Log-probabilities of known prompt tokens, a chunk of rows at a time."""
        out: list[torch.Tensor] = []
        slot = int(layout.slots[rows.row])
        start = int(layout.starts[rows.row])
        for at in range(0, rows.count, _PROMPT_CHUNK):
            num = min(_PROMPT_CHUNK, rows.count - at)
            part = hidden[rows.first + at : rows.first + at + num]
            logits = self.model.logits(part).to(torch.float32)
            known = start + 1 + at
            ids = self.batch.tokens[slot, known : known + num].to(torch.int64)
            scored: LogprobRows = score(logits, ids, rows.top, self.sampler.normalize)
            out += [ids, *scored.tensors()]
        return out

    def _verify(self, sampled: Sampled, layout: Layout, dev: dict[str, torch.Tensor]) -> Verified:
        """Keep drafts for as long as the sampled token equals the next draft.

        Each row's own draw decides (greedy, or keyed noise at its position), so the emitted
        text is the one without drafts, whatever was drafted.
        """
        tokens, status = sampled.tokens.to(torch.int32), sampled.status
        if layout.max_drafts == 0:
            return Verified(tokens[:, None], torch.ones_like(tokens), status)
        drafts = dev["drafts"]
        column = torch.arange(1 + layout.max_drafts, device=tokens.device)
        place = (dev["first"][:, None] + column).clamp_(max=layout.num_logits - 1)
        own, bad = tokens[place], status[place]
        slot, position = dev["slot"][place], dev["position"][place]
        # The input of a row's successor is the draft that the row judges.
        judged = self.batch.tokens[slot, (position + 1).clamp_(max=self.batch.width - 1)]
        kept = (own == judged) & (column < drafts[:, None]) & (bad == 0)
        run = kept.to(torch.int32).cumprod(dim=1).sum(dim=1)
        # The row after the kept ones is emitted too; its status is the request's.
        last = bad.gather(1, run[:, None])[:, 0]
        return Verified(own, (run + 1).to(torch.int32), last)

    def _commit(
        self,
        verified: Verified,
        layout: Layout,
        dev: dict[str, torch.Tensor],
        plan: SamplePlan,
    ) -> None:
        """Write the emitted tokens into the token table, and count them where penalties do."""
        first = dev["first"] if layout.max_drafts else slice(None)
        slot, position = dev["slot"][first], dev["position"][first]
        self.commit(verified, slot, position, bool(plan.union & Feature.PENALTY))

    def commit(
        self, verified: Verified, slot: torch.Tensor, position: torch.Tensor, penalties: bool
    ) -> None:
        """Device part of the commit: slot and position int64 [Rs] of each request's first row."""
        batch = self.batch
        column = torch.arange(verified.tokens.shape[1], device=slot.device)
        emitted = column < verified.counts[:, None]
        # The last column of the table swallows what is not emitted.
        place = torch.where(emitted, position[:, None] + 1 + column, batch.width - 1)
        batch.tokens.index_put_((slot[:, None].expand_as(place), place), verified.tokens)
        if penalties:
            rows = batch.params[slot, PENALTY_ROW].to(torch.int64)
            counted = (emitted & (rows >= 0)[:, None]).to(torch.int32)
            index = (rows.clamp(min=0)[:, None].expand_as(place), verified.tokens.to(torch.int64))
            batch.counts.index_put_(index, counted, accumulate=True)


def bind_caches(model: RunnerModel, pool: KVPool) -> None:
    """Give each attention layer its views of the pool."""
    for layer, parts in zip(model.attention_layers, model.kv_offsets(), strict=True):
        group = model.attention_keys[layer.key].group
        layer.cache = tuple(pool.view(group, part, offset) for part, offset in parts)
