"""Dummy steps over the null block: the peak memory of a step, and the first run of each kernel.

Their rows read the zeros of block 0 and write nothing, so they need no request and leave no
trace in the pool.
"""

from __future__ import annotations

from typing import Any

import torch

from cardcage.core.contracts import StepMeta
from cardcage.core.runtime.batch import BatchState
from cardcage.core.runtime.kv_pool import KVPool
from cardcage.core.runtime.layers import ModelInput
from cardcage.core.runtime.model_runner import ModelRunner, RunnerModel, bind_caches
from cardcage.core.runtime.sample_plan import SamplePlan
from cardcage.core.runtime.sampler import Sampler
from cardcage.core.runtime.slot_params import Feature
from cardcage.core.types import KVGroupSpec


def null_meta(group: KVGroupSpec, query_lens: list[int], device: torch.device) -> StepMeta:
    """A step of fresh requests that all live in the null block."""
    num, total = len(query_lens), sum(query_lens)
    start = [0]
    for length in query_lens:
        start.append(start[-1] + length)
    columns = -(-max(query_lens) // group.block_size)
    return StepMeta(
        num_reqs=num,
        num_tokens=total,
        num_decodes=num if max(query_lens) == 1 else 0,
        max_query_len=max(query_lens),
        max_seq_len=max(query_lens),
        query_start_loc=torch.tensor(start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(query_lens, dtype=torch.int32, device=device),
        block_table=torch.zeros(num, columns, dtype=torch.int32, device=device),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        query_lens_host=query_lens,
        seq_lens_host=query_lens,
    )


@torch.inference_mode()
def dummy_step(model: RunnerModel, query_lens: list[int], device: torch.device) -> torch.Tensor:
    """Hidden states of a step over the null block; caches must be bound."""
    groups = model.kv_groups()
    metas = [null_meta(group, query_lens, device) for group in groups]
    plans = [key.backend.plan(metas[key.group]) for key in model.attention_keys]
    positions = torch.cat([torch.arange(n, device=device) for n in query_lens])
    return model.forward(ModelInput(torch.zeros_like(positions), positions, plans))


@torch.inference_mode()
def dummy_sample(model: RunnerModel, sampler: Sampler, hidden: torch.Tensor) -> None:
    """Sample rows of the null slot with every stage that needs no list of a request."""
    batch, num = sampler.batch, hidden.shape[0]
    slot = torch.full((num,), batch.num_slots, dtype=torch.int64, device=batch.device)
    union = Feature.RANDOM | Feature.TEMPERATURE | Feature.MIN_P | Feature.TRUNCATE
    plan = SamplePlan(num, union, from_table=True)
    sampler(model.logits(hidden), plan, {"slot": slot, "position": torch.zeros_like(slot)})


def peak_bytes(model: Any, num_tokens: int, num_seqs: int, max_model_len: int) -> int:
    """Bytes that a step takes beyond what is allocated now, measured on the accelerator.

    Runs the largest step: `num_tokens` tokens over as many requests as they need, then samples
    `num_seqs` rows.
    """
    device: torch.device = model.device
    groups = model.kv_groups()
    pool = KVPool(groups, max((g.page_bytes for g in groups), default=64), device)
    bind_caches(model, pool)
    sampler = Sampler(BatchState(0, 1, model.desc.vocab_size, groups, device))
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    longest = min(num_tokens, max_model_len)
    lens = [longest] * (num_tokens // longest)
    hidden = dummy_step(model, lens, device)
    rows = min(num_seqs, hidden.shape[0])
    dummy_sample(model, sampler, hidden[:rows])
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    for layer in model.attention_layers:
        layer.cache = ()
    return int(peak)


def warm_up(runner: ModelRunner, max_tokens: int) -> None:
    """Run a small prefill and a decode step, so that the first request pays for no set-up."""
    model, device = runner.model, runner.batch.device
    block = max((g.block_size for g in model.kv_groups()), default=1)
    for lens in ([min(block, max_tokens)], [1]):
        hidden = dummy_step(model, lens, device)
        dummy_sample(model, runner.sampler, hidden[-1:])
