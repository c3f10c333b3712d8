"""Persistent tables against a model in plain Python, under random plans."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cardcage.core.errors import ExecutionError
from cardcage.core.runtime.arena import Arena
from cardcage.core.runtime.batch import BatchState, spread, table_bytes
from cardcage.core.runtime.layout import layout_of
from cardcage.core.runtime.slot_params import (
    IN_PROMPT,
    PENALTY_ROW,
    SEED,
    TEMPERATURE,
    TOP_K,
    Feature,
    features_of,
    param_words,
)
from cardcage.core.types import KVGroupSpec, SamplingParams, SlotAdmit, StepPlan
from tests.support.fake_model import Driver

CPU = torch.device("cpu")
GROUPS = (KVGroupSpec("a", "full", 4, 256), KVGroupSpec("b", "window", 8, 256, {"window": 8}))


def make(num_slots: int = 5, max_len: int = 40, vocab: int = 50) -> BatchState:
    return BatchState(num_slots, max_len, vocab, GROUPS, CPU)


def empty_plan(**changes: object) -> StepPlan:
    none = np.zeros(0, np.int32)
    plan = StepPlan(0, none, none, none, none, np.zeros(0, np.bool_))
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


def apply(batch: BatchState, plan: StepPlan) -> None:
    deltas = batch.prepare(plan)
    batch.apply(deltas, {k: torch.from_numpy(v) for k, v in deltas.uploads.items()})


def rich(rng: random.Random, vocab: int) -> SamplingParams:
    """Parameters with a random subset of the features."""
    some = lambda n: tuple(rng.randrange(vocab) for _ in range(n))  # noqa: E731
    flip = lambda: rng.random() < 0.5  # noqa: E731
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 5]),
        allowed_token_ids=some(rng.randint(1, 9)) if flip() else None,
        logit_bias=dict.fromkeys(some(3), 1.5) if flip() else None,
        bad_words_ids=(some(1), some(3)) if flip() else (),
        frequency_penalty=0.5 if flip() else 0.0,
        min_tokens=rng.choice([0, 4]),
        stop_token_ids=some(2),
    )


def test_tables_follow_a_plain_model_under_random_plans() -> None:
    rng, batch = random.Random(0), make()
    model: dict[int, tuple[list[int], list[list[int]], SlotAdmit]] = {}
    for _ in range(150):
        releases, admits, appends = [], [], []
        for slot in list(model):
            if rng.random() < 0.25:
                releases.append(slot)
                del model[slot]
        for slot in range(batch.num_slots):
            if slot not in model and rng.random() < 0.5:
                tokens = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
                blocks = tuple(
                    [rng.randrange(1, 99) for _ in range(rng.randint(0, 3))] for _ in GROUPS
                )
                admit = SlotAdmit(
                    slot,
                    f"r{slot}",
                    tokens,
                    rng.randint(1, len(tokens)),
                    0,
                    rich(rng, 50),
                    rng.randrange(-(2**63), 2**63),
                    (3, 7),
                    blocks,
                )
                admits.append(admit)
                model[slot] = (list(tokens), [list(b) for b in blocks], admit)
        for slot, (_, tables, _) in model.items():
            for g in range(len(GROUPS)):
                room = batch.table_widths[g] - len(tables[g])
                if room > 0 and rng.random() < 0.4:
                    new = [rng.randrange(1, 99) for _ in range(rng.randint(1, min(2, room)))]
                    appends.append((g, slot, len(tables[g]), new))
                    tables[g].extend(new)
        apply(batch, empty_plan(releases=releases, admits=admits, block_appends=appends))
        for slot, (tokens, tables, admit) in model.items():
            assert batch.tokens[slot, : len(tokens)].tolist() == tokens
            for g, table in enumerate(tables):
                got = batch.tables[g][slot].tolist()
                assert got == table + [0] * (batch.table_widths[g] - len(table))
            check_parameters(batch, admit)
    assert int(batch.tokens.min()) >= 0
    apply(batch, empty_plan(releases=list(model)))
    assert batch._arena.num_free == batch._arena.size
    assert sorted(batch._free_penalty_rows) == list(range(batch._penalty_rows))


def check_parameters(batch: BatchState, admit: SlotAdmit) -> None:
    params, slot = admit.params, batch.slots[admit.slot]
    assert slot is not None
    words = batch.params[admit.slot]
    assert float(words.view(torch.float32)[TEMPERATURE]) == pytest.approx(params.temperature)
    assert int(words[TOP_K]) == (0 if params.greedy else params.top_k)
    assert int(words[SEED : SEED + 2].view(torch.int64)) == admit.seed

    def words_of(name: str) -> list[int]:
        at, num = slot.lists[name]
        return batch.arena[at : at + num].tolist()

    if params.allowed_token_ids is not None:
        assert words_of("allowed") == sorted(set(params.allowed_token_ids))
    if params.logit_bias:
        assert words_of("bias") == list(params.logit_bias)
    if params.min_tokens:
        assert words_of("stop") == sorted({3, 7, *params.stop_token_ids})
    for word, (at, num) in zip(params.bad_words_ids, slot.bad_words):
        assert batch.arena[at : at + num].tolist() == list(word)
    if params.frequency_penalty:
        counts = batch.counts[int(words[PENALTY_ROW])]
        prompt = set(admit.token_ids[: admit.prompt_len])
        outputs = list(admit.token_ids[admit.prompt_len :])
        for token in range(50):
            assert int(counts[token]) & (IN_PROMPT - 1) == outputs.count(token)
            assert (int(counts[token]) >= IN_PROMPT) == (token in prompt)


def test_append_to_a_slot_admitted_in_the_same_plan() -> None:
    batch = make()
    admit = SlotAdmit(1, "r", [1, 2], 2, 0, SamplingParams(), 0, (), ([4], []))
    apply(batch, empty_plan(admits=[admit], block_appends=[(0, 1, 1, [9, 8]), (1, 1, 0, [7])]))
    assert batch.tables[0][1, :4].tolist() == [4, 9, 8, 0]
    assert batch.tables[1][1, :2].tolist() == [7, 0]


def test_plan_may_change_after_prepare() -> None:
    batch = make()
    blocks, tokens = [4], [1, 2]
    admit = SlotAdmit(0, "r", tokens, 2, 0, SamplingParams(), 0, (), (blocks, []))
    plan = empty_plan(admits=[admit])
    deltas = batch.prepare(plan)
    blocks.append(9)
    tokens[0] = 40
    plan.admits.clear()
    batch.apply(deltas, {k: torch.from_numpy(v) for k, v in deltas.uploads.items()})
    assert batch.tables[0][0, :2].tolist() == [4, 0]
    assert batch.tokens[0, :2].tolist() == [1, 2]


def test_taken_slot_and_too_long_request_are_refused() -> None:
    batch = make()
    admit = SlotAdmit(0, "r", [1], 1, 0, SamplingParams(), 0, (), ([1], [1]))
    apply(batch, empty_plan(admits=[admit]))
    with pytest.raises(ExecutionError, match="slot 0 is taken"):
        batch.prepare(empty_plan(admits=[admit]))
    long = SlotAdmit(1, "r", [1] * 41, 1, 0, SamplingParams(), 0, (), ([1], [1]))
    with pytest.raises(ExecutionError, match="at most 40"):
        batch.prepare(empty_plan(admits=[long]))


@pytest.mark.parametrize(("changes", "tokens", "name"), [
    ({}, [1, 50], "prompt"),
    ({}, [-1], "prompt"),
    ({"allowed_token_ids": (50,)}, [1], "allowed_token_ids"),
    ({"logit_bias": {99: 1.0}}, [1], "logit_bias"),
    ({"stop_token_ids": (50,)}, [1], "stop_token_ids"),
    ({"bad_words_ids": ((1, 77),)}, [1], "bad_words"),
    ({"bad_words_ids": ((1,), ())}, [1], "bad_words"),
])  # fmt: skip
def test_ids_outside_the_vocabulary_fail_the_request_alone(changes, tokens, name) -> None:
    batch = make()
    params = SamplingParams(**changes)
    admit = SlotAdmit(0, "r", tokens, len(tokens), 0, params, 0, (), ([1], [1]))
    apply(batch, empty_plan(admits=[admit]))
    slot = batch.slots[0]
    assert slot is not None
    assert name in str(slot.error)
    assert batch.tokens[0, : len(tokens)].tolist() == [0] * len(tokens)
    assert batch.features[0] == 0


def test_inputs_of_a_mixed_step() -> None:
    groups = (GROUPS[0], KVGroupSpec("b", "window", 4, 256, {"window": 8}))
    batch, driver = BatchState(5, 40, 50, groups, CPU), Driver(2)
    a, admit_a = driver.admit(3, list(range(9)))
    b, admit_b = driver.admit(1, list(range(20, 26)))
    a.computed = 8
    plan = driver.plan([(a, 1, True), (b, 5, False)], [admit_a, admit_b])
    apply(batch, plan)
    layout = layout_of(plan)
    dev = {
        "slots": torch.from_numpy(layout.slots),
        "starts": torch.from_numpy(layout.starts),
        "query_start": torch.from_numpy(layout.query_start),
    }
    inputs = batch.build_inputs(layout, dev)
    assert inputs.input_ids.tolist() == [8, 20, 21, 22, 23, 24]
    assert inputs.positions.tolist() == [8, 0, 1, 2, 3, 4]
    for g, meta in enumerate(inputs.metas):
        assert meta.query_start_loc.tolist() == [0, 1, 6]
        assert meta.seq_lens.tolist() == [9, 5]
        assert (meta.num_reqs, meta.num_tokens, meta.num_decodes) == (2, 6, 1)
        assert (meta.max_query_len, meta.max_seq_len) == (5, 9)
        assert (meta.query_lens_host, meta.seq_lens_host) == ([1, 5], [9, 5])
        expected = [a.blocks[g][2] * 4] + [b.blocks[g][i // 4] * 4 + i % 4 for i in range(5)]
        assert meta.slot_mapping.tolist() == expected
        assert meta.block_table[0, :3].tolist() == a.blocks[g]


def test_null_slot_reads_and_writes_nothing() -> None:
    batch = make()
    slots = torch.full((3,), batch.num_slots)
    inputs = batch.decode_inputs(slots, torch.zeros(3, dtype=torch.int64), [1] * 3, [1] * 3, 1)
    assert inputs.input_ids.tolist() == [0, 0, 0]
    for meta in inputs.metas:
        assert meta.slot_mapping.tolist() == [-1, -1, -1]
        assert int(meta.block_table.sum()) == 0
        assert meta.seq_lens.tolist() == [1, 1, 1]


def test_layout_of_rows_with_drafts() -> None:
    plan = empty_plan(
        slots=np.array([4, 2, 7], np.int32), starts=np.array([10, 0, 5], np.int32),
        num_tokens=np.array([3, 6, 1], np.int32), num_drafts=np.array([2, 0, 0], np.int32),
        samples=np.array([True, False, True]),
    )  # fmt: skip
    layout = layout_of(plan)
    assert layout.sampled.tolist() == [0, 2]
    assert layout.row.tolist() == [0, 0, 0, 2]
    assert layout.local.tolist() == [0, 1, 2, 0]
    assert layout.token_index.tolist() == [0, 1, 2, 9]
    assert layout.position.tolist() == [10, 11, 12, 5]
    assert layout.first.tolist() == [0, 3]
    assert layout.max_drafts == 2
    assert not layout.uniform
    plan.num_drafts = np.array([3, 0, 0], np.int32)
    with pytest.raises(ExecutionError, match="as many drafts as tokens"):
        layout_of(plan)


def test_greedy_rows_have_neutral_truncation() -> None:
    params = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.3)
    words = param_words(params, 0, 3, -1)
    assert words[TOP_K] == 0
    assert words.view(np.float32)[1:3].tolist() == [1.0, 0.0]
    assert features_of(params) == 0
    assert features_of(SamplingParams(temperature=1.0)) == Feature.RANDOM


def test_spread() -> None:
    got = spread(torch.tensor([5, 100, 2]), torch.tensor([3, 0, 2]), 5)
    assert got.tolist() == [5, 6, 7, 2, 3]


def test_arena_never_overlaps_and_merges() -> None:
    rng, arena = random.Random(1), Arena(16)
    held: dict[int, int] = {}
    for _ in range(400):
        if held and rng.random() < 0.5:
            offset = rng.choice(list(held))
            arena.free(offset, held.pop(offset))
        else:
            num = rng.randint(1, 20)
            offset = arena.allocate(num)
            assert offset + num <= arena.size
            assert all(offset + num <= o or o + n <= offset for o, n in held.items())
            held[offset] = num
    for offset, num in held.items():
        arena.free(offset, num)
    assert arena._free == [(0, arena.size)]


def test_reset_forgets_everything() -> None:
    batch = make()
    params = SamplingParams(frequency_penalty=1.0, allowed_token_ids=(1, 2))
    admit = SlotAdmit(0, "r", [1], 1, 0, params, 0, (), ([1], [1]))
    apply(batch, empty_plan(admits=[admit]))
    batch.reset()
    assert batch.slots == [None] * 5
    assert batch.features.sum() == 0
    assert all(int(t.sum()) == 0 for t in batch.tables)
    apply(batch, empty_plan(admits=[admit]))  # the slot is free again


def test_table_bytes() -> None:
    batch = make()
    assert 0 <= batch.words.nbytes - table_bytes(5, 40, GROUPS) < 64
