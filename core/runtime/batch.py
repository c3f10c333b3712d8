"""The persistent state of a batch: per-slot tables on the device, fed by the deltas of plans.

A request keeps its slot for as long as it runs; the order of a step's rows is another matter.
Token ids, block tables and sampling parameters live on the device, where the previous step put
its tokens, so a plan carries no ids and the next step can be launched before they are known.
`BatchState.prepare` runs on the host and touches no tensor; `apply` and `build_inputs` launch
work on the device and never wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cardcage.core.contracts import StepMeta
from cardcage.core.errors import ExecutionError
from cardcage.core.runtime.arena import Arena
from cardcage.core.runtime.layout import Layout
from cardcage.core.runtime.slot_params import (
    IN_PROMPT,
    NUM_PARAMS,
    Feature,
    Int32,
    features_of,
    param_words,
)
from cardcage.core.types import KVGroupSpec, SamplingParams, SlotAdmit, StepPlan


@dataclass(slots=True)
class Slot:
    """The host's knowledge of the request in a slot. `lists` are (offset, length) in the arena."""

    request_id: str
    params: SamplingParams
    prompt_len: int
    lists: dict[str, tuple[int, int]] = field(default_factory=dict)
    extent: tuple[int, int] = (0, 0)
    bad_words: tuple[tuple[int, int], ...] = ()
    penalty_row: int = -1
    error: str | None = None


@dataclass(slots=True)
class Deltas:
    """What `apply` must do on the device before the rows run."""

    uploads: dict[str, NDArray[Any]] = field(default_factory=dict)
    penalties: list[tuple[int, int, int, int]] = field(default_factory=list)
    penalty_rows: int = 0  # rows that the count table must have
    arena_size: int = 0
    zero_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepInputs:
    """The device tensors of one step: what the model reads, by token and by KV group."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metas: list[StepMeta]


class BatchState:
    """Tables of `num_slots` slots, plus one null slot that padding rows point at.

    The tables are one int32 buffer, so that all deltas of a step are one upload and one scatter.
    Invariant: every token id in the tables is a legal id, and the null slot's block tables hold
    only the null block 0, to which nothing is ever written.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        groups: Sequence[KVGroupSpec],
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.groups = tuple(groups)
        self.device = device
        # One column for a token sampled at the last position, one that swallows unwanted writes.
        self.width = max_model_len + 2
        self.table_widths = [-(-max_model_len // g.block_size) for g in self.groups]
        sizes = [self.width, NUM_PARAMS, *self.table_widths]
        rows = num_slots + 1
        self._bases = [0]
        for size in sizes:
            # Even offsets: the seeds are read as int64.
            self._bases.append(self._bases[-1] + rows * size + (rows * size) % 2)
        self.words = torch.zeros(self._bases[-1], dtype=torch.int32, device=device)
        views = [
            self.words[base : base + rows * size].view(rows, size)
            for base, size in zip(self._bases, sizes)
        ]
        self.tokens, self.params, self.tables = views[0], views[1], views[2:]
        self.arena = torch.zeros(1024, dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.slots: list[Slot | None] = [None] * num_slots
        self.features = np.zeros(rows, np.int32)
        # True for slots whose request can run: taken, and nothing wrong with it.
        self.sound = np.zeros(rows, np.bool_)
        self._arena = Arena(len(self.arena))
        self._free_penalty_rows: list[int] = []
        self._penalty_rows = 0
        self.reset()

    def reset(self) -> None:
        """Forget every slot."""
        self.slots = [None] * self.num_slots
        self.features[:] = 0
        self.sound[:] = False
        self._arena = Arena(len(self.arena))
        self._free_penalty_rows = list(range(self._penalty_rows))
        neutral = torch.from_numpy(param_words(SamplingParams(temperature=0.0), 0, 0, -1))
        self.params[:] = neutral.to(self.device)
        for table in self.tables:
            table.zero_()

    # -- host side -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> Deltas:
        """Take in a plan's slot changes. Host only; the plan may change after this returns.

        Raises:
            ExecutionError: The plan breaks an invariant, such as admitting to a taken slot.
        """
        deltas = Deltas()
        runs: list[tuple[int, Int32]] = []
        arena_runs: list[tuple[int, Int32]] = []
        for index in plan.releases:
            self._release(index)
        fresh: dict[int, list[Int32]] = {}
        for admit in plan.admits:
            fresh[admit.slot] = self._admit(admit, runs, arena_runs, deltas)
        for group, index, at, blocks in plan.block_appends:
            if index in fresh:
                fresh[index][group][at : at + len(blocks)] = blocks
            else:
                runs.append((self._table_base(group, index) + at, np.asarray(blocks, np.int32)))
        self._drafts(plan, runs)
        deltas.zero_blocks = [(group, list(ids)) for group, ids in plan.zero_blocks]
        deltas.copies = list(plan.copies)
        deltas.arena_size = self._arena.size
        deltas.penalty_rows = self._penalty_rows
        _pack(deltas.uploads, "run", runs)
        _pack(deltas.uploads, "arena", arena_runs)
        return deltas

    def _drafts(self, plan: StepPlan, runs: list[tuple[int, Int32]]) -> None:
        """Drafts made on the host go after the last known token of their row."""
        if not plan.drafts:
            return
        for row in np.flatnonzero(plan.num_drafts).tolist():
            index, num = int(plan.slots[row]), int(plan.num_drafts[row])
            ids = plan.drafts.get(index)
            if ids is None:
                continue  # drafts that are on the device already
            end = int(plan.starts[row] + plan.num_tokens[row])
            if len(ids) != num or end > self.max_model_len:
                raise ExecutionError(
                    f"slot {index} has {len(ids)} draft ids for {num} drafts that end at {end}"
                )
            # Whatever was guessed, the tables hold legal ids only: a wrong one is rejected.
            legal = np.clip(np.asarray(ids, np.int64), 0, self.vocab_size - 1).astype(np.int32)
            runs.append((index * self.width + end - num, legal))

    def _table_base(self, group: int, index: int) -> int:
        return self._bases[2 + group] + index * self.table_widths[group]

    def _release(self, index: int) -> None:
        slot = self.slots[index]
        if slot is None:
            return  # a slot may be released that failed before it was admitted
        self._arena.free(*slot.extent)
        if slot.penalty_row >= 0:
            self._free_penalty_rows.append(slot.penalty_row)
        self.slots[index] = None
        self.features[index] = 0
        self.sound[index] = False

    def _admit(
        self,
        admit: SlotAdmit,
        runs: list[tuple[int, Int32]],
        arena_runs: list[tuple[int, Int32]],
        deltas: Deltas,
    ) -> list[Int32]:
        index, params = admit.slot, admit.params
        if not 0 <= index < self.num_slots or self.slots[index] is not None:
            raise ExecutionError(f"slot {index} is taken or does not exist")
        ids = np.asarray(admit.token_ids, np.int32)
        if len(ids) > self.max_model_len:
            raise ExecutionError(
                f"request {admit.request_id} has {len(ids)} tokens; at most {self.max_model_len}"
            )
        slot = self.slots[index] = Slot(admit.request_id, params, admit.prompt_len)
        slot.error = self._problem(ids, admit)
        self.sound[index] = slot.error is None
        if slot.error is not None:
            # Its rows still run (the plan counts on them) on harmless ids and no parameters.
            ids = np.zeros_like(ids)
            params = SamplingParams(temperature=0.0)
        else:
            self.features[index] = features_of(params)
            self._admit_lists(slot, admit, arena_runs)
        if self.features[index] & Feature.PENALTY:
            if not self._free_penalty_rows:
                self._free_penalty_rows.append(self._penalty_rows)
                self._penalty_rows += 1
            slot.penalty_row = self._free_penalty_rows.pop()
            deltas.penalties.append((slot.penalty_row, index, admit.prompt_len, len(ids)))
        runs.append((index * self.width, ids))
        words = param_words(params, admit.seed, admit.prompt_len, slot.penalty_row)
        runs.append((self._bases[1] + index * NUM_PARAMS, words))
        tables = []
        for group, blocks in enumerate(admit.block_ids):
            table = np.zeros(self.table_widths[group], np.int32)
            table[: len(blocks)] = blocks
            tables.append(table)
            runs.append((self._table_base(group, index), table))
        return tables

    def _problem(self, ids: Int32, admit: SlotAdmit) -> str | None:
        """Why a request cannot run: ids that the model does not have."""
        vocab, params = self.vocab_size, admit.params
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            return f"the prompt holds token ids outside 0..{vocab - 1}, the model's vocabulary"
        if () in params.bad_words_ids:
            return "bad_words holds an empty sequence of token ids"
        words = [token for word in params.bad_words_ids for token in word]
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
            ("bad_words", words),
        ):
            wrong = [token for token in tokens if not 0 <= token < vocab]
            if wrong:
                return f"{name} holds {wrong[0]}; the model's token ids are 0..{vocab - 1}"
        return None

    def _admit_lists(
        self, slot: Slot, admit: SlotAdmit, arena_runs: list[tuple[int, Int32]]
    ) -> None:
        """Lay the request's lists of token ids out in the arena."""
        params = admit.params
        parts: dict[str, Int32] = {}
        if params.allowed_token_ids is not None:
            parts["allowed"] = np.unique(np.asarray(params.allowed_token_ids, np.int32))
        if params.logit_bias:
            parts["bias"] = np.fromiter(params.logit_bias, np.int32)
            bias = np.fromiter(params.logit_bias.values(), np.float32)
            parts["bias_values"] = np.clip(bias, -100.0, 100.0).view(np.int32)
        if params.min_tokens > 0:
            # ignore_eos does not matter here: end-of-sequence counts as a stop id either way.
            stop = (*admit.eos_token_ids, *params.stop_token_ids)
            stop = tuple(t for t in stop if 0 <= t < self.vocab_size)
            parts["stop"] = np.unique(np.asarray(stop, np.int32))
        if params.bad_words_ids:
            flat = [token for word in params.bad_words_ids for token in word]
            parts["bad_words"] = np.asarray(flat, np.int32)
        if not parts:
            return
        data = np.concatenate(list(parts.values()))
        offset = self._arena.allocate(len(data))
        slot.extent = (offset, len(data))
        arena_runs.append((offset, data))
        for name, part in parts.items():
            slot.lists[name] = (offset, len(part))
            offset += len(part)
        if params.bad_words_ids:
            at, words = slot.lists["bad_words"][0], []
            for word in params.bad_words_ids:
                words.append((at, len(word)))
                at += len(word)
            slot.bad_words = tuple(words)

    # -- device side -----------------------------------------------------------------------

    def apply(self, deltas: Deltas, dev: dict[str, torch.Tensor]) -> None:
        """Bring the tables up to date; `dev` holds the uploaded arrays of the deltas."""
        if deltas.arena_size > len(self.arena):
            grown = torch.zeros(deltas.arena_size, dtype=torch.int32, device=self.device)
            grown[: len(self.arena)] = self.arena
            self.arena = grown
        have = self.counts.shape[0]
        if deltas.penalty_rows > have:
            rows = max(deltas.penalty_rows, 2 * have)
            counts = torch.zeros(rows, self.vocab_size, dtype=torch.int32, device=self.device)
            counts[:have] = self.counts
            self.counts = counts
        for name, target in (("run", self.words), ("arena", self.arena)):
            if f"{name}_values" in dev:
                values = dev[f"{name}_values"]
                places = spread(dev[f"{name}_at"], dev[f"{name}_len"], len(values))
                target.index_copy_(0, places, values)
        for row, index, prompt_len, total in deltas.penalties:
            counts, ids = self.counts[row], self.tokens[index, :total].to(torch.int64)
            counts.zero_()
            counts.index_fill_(0, ids[:prompt_len], IN_PROMPT)
            counts.index_add_(0, ids[prompt_len:], torch.ones_like(ids[prompt_len:]).int())

    def build_inputs(self, layout: Layout, dev: dict[str, torch.Tensor]) -> StepInputs:
        """Gather the step's token ids, positions and KV indices from the tables.

        `dev` holds slots, starts and, unless every row has one token, query_start: int64 [R].
        """
        slots, starts = dev["slots"], dev["starts"]
        longest = max(layout.seq_lens)
        if layout.num_tokens == layout.num_rows:
            return self.decode_inputs(slots, starts, layout.query_lens, layout.seq_lens, longest)
        start = dev["query_start"]
        lens = start[1:] - start[:-1]
        arange = torch.arange(layout.num_tokens, device=self.device)
        row = torch.repeat_interleave(lens, output_size=layout.num_tokens)
        positions = starts[row] + (arange - start[row])
        ids = self.tokens[slots[row], positions].to(torch.int64)
        metas = []
        for group in range(len(self.groups)):
            table, size = self._table(group, slots, longest)
            block = table[row, positions // size]
            metas.append(
                StepMeta(
                    num_reqs=layout.num_rows,
                    num_tokens=layout.num_tokens,
                    num_decodes=layout.num_decodes,
                    max_query_len=max(layout.query_lens),
                    max_seq_len=longest,
                    query_start_loc=start.to(torch.int32),
                    seq_lens=(starts + lens).to(torch.int32),
                    block_table=table,
                    slot_mapping=_slot_mapping(block, positions, size),
                    query_lens_host=layout.query_lens,
                    seq_lens_host=layout.seq_lens,
                )
            )
        return StepInputs(self.legal(ids), positions, metas)

    def decode_inputs(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        query_lens: list[int],
        seq_lens: list[int],
        longest: int,
    ) -> StepInputs:
        """The inputs of one-token rows: a function of persistent tensors, so graphs capture it."""
        num = slots.shape[0]
        ids = self.tokens[slots, starts].to(torch.int64)
        metas = []
        for group in range(len(self.groups)):
            table, size = self._table(group, slots, longest)
            column = starts // size
            block = table.gather(1, column[:, None])[:, 0]
            metas.append(
                StepMeta(
                    num_reqs=num,
                    num_tokens=num,
                    num_decodes=num,
                    max_query_len=1,
                    max_seq_len=longest,
                    query_start_loc=torch.arange(num + 1, dtype=torch.int32, device=self.device),
                    seq_lens=(starts + 1).to(torch.int32),
                    block_table=table,
                    slot_mapping=_slot_mapping(block, starts, size),
                    query_lens_host=query_lens,
                    seq_lens_host=seq_lens,
                )
            )
        return StepInputs(self.legal(ids), starts, metas)

    def _table(self, group: int, slots: torch.Tensor, longest: int) -> tuple[torch.Tensor, int]:
        size = self.groups[group].block_size
        return self.tables[group][:, : -(-longest // size)][slots], size

    def legal(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids clamped into the vocabulary, in place."""
        # Admission checks ids and the sampler draws legal ones; a draft may still be anything.
        return ids.clamp_(0, self.vocab_size - 1)


def table_bytes(num_slots: int, max_model_len: int, groups: Sequence[KVGroupSpec]) -> int:
    """Device bytes of the tables of a `BatchState`."""
    blocks = sum(-(-max_model_len // g.block_size) for g in groups)
    return (num_slots + 1) * (max_model_len + 2 + NUM_PARAMS + blocks) * 4


def spread(at: torch.Tensor, lens: torch.Tensor, total: int) -> torch.Tensor:
    """The indices at[i] .. at[i] + lens[i] of all i, one after the other: int64 [total]."""
    shift = at - (torch.cumsum(lens, 0) - lens)
    base = torch.repeat_interleave(shift, lens, output_size=total)
    return base + torch.arange(total, device=at.device)


def _slot_mapping(block: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Cache slots to write, int64; -1 where the block is null (padding, freed window)."""
    slot = block.to(torch.int64) * size + positions % size
    return torch.where(block > 0, slot, -1)


def _pack(uploads: dict[str, NDArray[Any]], name: str, runs: list[tuple[int, Int32]]) -> None:
    if runs:
        uploads[f"{name}_at"] = np.array([at for at, _ in runs], np.int64)
        uploads[f"{name}_len"] = np.array([len(values) for _, values in runs], np.int64)
        uploads[f"{name}_values"] = np.concatenate([values for _, values in runs])
