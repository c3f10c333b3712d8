"""The backend object: plans a step, launches the kernels, owns the scratch memory.

A step's decode rows (and steps whose requests all have few rows) go to the split-KV kernel, the
rest to the prefill kernel, in one `forward`. Which kernels run and their grids follow from the
batch's counts on the host (`num_reqs`, `num_decodes`, `num_tokens`, `max_query_len`) and the
chip; lengths are only read on the device. So a captured step replays with any lengths.

Scratch memory is kept per power-of-two batch size and never freed, because captured graphs hold
its addresses. Steps must be ordered on one stream, and each attention key needs a backend of its
own: a second `plan` overwrites the first one's work list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cardcage.core.contracts import AttentionNeed, KVPart, StepMeta

from . import kernels
from .tuned import DecodeConfig, PrefillConfig, decode_config, prefill_config

LOG2E = 1.4426950408889634
MIN_ROWS = 16  # smallest row count that tl.dot takes
DEFAULT_SMS = 108  # only when the platform tells none


@dataclass(slots=True)
class DecodePlan:
    """Work items of the decode rows, and room for the partial results of split requests."""

    num_reqs: int
    rows: int  # most query tokens of a request * group
    num_items: int
    items: torch.Tensor  # int32 [>= num_items, 8]
    first: torch.Tensor  # int32 [>= num_reqs + 1]
    part_out: torch.Tensor  # float32, see kernels
    part_lse: torch.Tensor


@dataclass(slots=True)
class PrefillPlan:
    """Work items of the rows of several tokens, int32 [num_items, ...] on the device."""

    config: PrefillConfig
    num_items: int
    items: torch.Tensor


@dataclass(slots=True)
class Plan:
    """One step for all layers of one attention key."""

    meta: StepMeta
    decode: DecodePlan | None
    prefill: PrefillPlan | None


class Backend:
    """One attention need on one device. `prefill` and `decode` override the tuned table."""

    def __init__(
        self,
        need: AttentionNeed,
        num_sms: int = 0,
        prefill: PrefillConfig | None = None,
        decode: DecodeConfig | None = None,
    ) -> None:
        self.need = need
        self.group = need.num_heads // need.num_kv_heads
        self.num_sms = num_sms or DEFAULT_SMS
        size = getattr(torch, need.dtype).itemsize
        self.block_d = max(16, triton.next_power_of_2(need.head_size))
        self.block_dv = max(16, triton.next_power_of_2(need.value_size))
        shape = (self.block_d, self.block_dv, size)
        self.prefill = prefill or prefill_config(need.arch, *shape)
        self.decode = decode or decode_config(need.arch, *shape)
        least = max(MIN_ROWS, triton.next_power_of_2(self.group))
        self.prefill = replace(self.prefill, block_m=max(self.prefill.block_m, least))
        self.small_prefill = replace(
            self.prefill,
            block_m=max(least, self.prefill.block_m // 2),
            num_warps=max(4, self.prefill.num_warps // 2),
        )
        self.decode_m = least
        if need.softcap > 0:
            self.scale, self.softcap = need.scale / need.softcap, need.softcap * LOG2E
        else:
            self.scale, self.softcap = need.scale * LOG2E, 0.0
        self._decode_scratch: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._prefill_scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def kv_parts(self) -> tuple[KVPart, ...]:
        n = self.need
        return (
            KVPart("k", (n.num_kv_heads, n.block_size, n.head_size), n.dtype),
            KVPart("v", (n.num_kv_heads, n.block_size, n.value_size), n.dtype),
        )

    # ---- once per step

    def plan(self, meta: StepMeta) -> Plan:
        most = self.decode_m // self.group  # query tokens that fit the decode tile
        if meta.max_query_len <= most:
            tokens = 1 if meta.max_query_len <= 1 else most
            return Plan(meta, self._plan_decode(meta, meta.num_reqs, tokens), None)
        decode = None
        if meta.num_decodes:
            decode = self._plan_decode(meta, meta.num_decodes, 1)
        return Plan(meta, decode, self._plan_prefill(meta))

    def _plan_decode(self, meta: StepMeta, num_reqs: int, tokens: int) -> DecodePlan:
        n, c = self.need, self.decode
        rows = tokens * self.group
        target = max(1, self.num_sms * c.waves // n.num_kv_heads)
        bucket = max(8, triton.next_power_of_2(num_reqs))
        key = (bucket, rows)
        if key not in self._decode_scratch:
            device = meta.seq_lens.device
            parts = (bucket + target) * n.num_kv_heads * rows
            self._decode_scratch[key] = (
                torch.empty(bucket + target, 8, dtype=torch.int32, device=device),
                torch.empty(bucket + 1, dtype=torch.int32, device=device),
                torch.empty(parts * n.value_size, dtype=torch.float32, device=device),
                torch.empty(parts, dtype=torch.float32, device=device),
            )
        items, first, part_out, part_lse = self._decode_scratch[key]
        num_items = num_reqs + target
        self._launch_plan(
            meta, items, first, 0, num_reqs, num_items, target, c.min_tiles, c.block_n, False
        )
        return DecodePlan(num_reqs, rows, num_items, items, first, part_out, part_lse)

    def _plan_prefill(self, meta: StepMeta) -> PrefillPlan:
        n = self.need
        num_reqs = meta.num_reqs - meta.num_decodes
        num_tokens = meta.num_tokens - meta.num_decodes
        config = self.prefill
        tiles = num_tokens * self.group // config.block_m + num_reqs
        if tiles * n.num_kv_heads <= self.num_sms:
            config = self.small_prefill
        block_q = config.block_m // self.group
        num_items = num_tokens // block_q + num_reqs
        bucket = max(8, triton.next_power_of_2(max(num_items, num_reqs + 1)))
        if bucket not in self._prefill_scratch:
            device = meta.seq_lens.device
            self._prefill_scratch[bucket] = (
                torch.empty(bucket, 8, dtype=torch.int32, device=device),
                torch.empty(bucket, dtype=torch.int32, device=device),
            )
        items, first = self._prefill_scratch[bucket]
        self._launch_plan(
            meta, items, first, meta.num_decodes, num_reqs, num_items, 1, 1, block_q, True
        )
        return PrefillPlan(config, num_items, items)

    def _launch_plan(
        self,
        meta: StepMeta,
        items: torch.Tensor,
        first: torch.Tensor,
        req0: int,
        num_reqs: int,
        num_items: int,
        target: int,
        min_tiles: int,
        tile: int,
        is_prefill: bool,
    ) -> None:
        block_w = 16
        kernels.plan_kernel[(triton.cdiv(num_items, block_w),)](
            meta.query_start_loc,
            meta.seq_lens,
            items,
            first,
            req0,
            num_reqs,
            num_items,
            target,
            min_tiles,
            TILE=tile,
            WINDOW=self.need.window,
            PREFILL=is_prefill,
            BLOCK_R=256,
            BLOCK_W=block_w,
        )

    # ---- once per layer

    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: Plan
    ) -> None:
        n = self.need
        k_cache, v_cache = cache
        _check_rows("k", k, n.num_kv_heads, n.head_size)
        _check_rows("v", v, n.num_kv_heads, n.value_size)
        slots = plan.meta.slot_mapping
        if slots.shape[0] == 0:
            return
        kernels.write_kernel[(slots.shape[0],)](
            k,
            v,
            k_cache,
            v_cache,
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            K=n.num_kv_heads,
            D=n.head_size,
            DV=n.value_size,
            S=n.block_size,
            BLOCK_K=triton.next_power_of_2(n.num_kv_heads),
            BLOCK_D=self.block_d,
            BLOCK_DV=self.block_dv,
        )

    def forward(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: Plan,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n = self.need
        _check_rows("q", q, n.num_heads, n.head_size)
        if out is None:
            out = torch.empty(
                (q.shape[0], n.num_heads, n.value_size), dtype=q.dtype, device=q.device
            )
        _check_rows("out", out, n.num_heads, n.value_size)
        if lse is not None and lse.stride(1) != 1:
            raise ValueError("attention: lse [H, T] must be contiguous in its last dimension")
        if plan.decode is not None:
            self._run_decode(q, cache, plan.meta, plan.decode, out, sinks, lse)
        if plan.prefill is not None:
            self._run_prefill(q, cache, plan.meta, plan.prefill, out, sinks, lse)
        return out

    def _constants(self, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> dict[str, Any]:
        n = self.need
        return {
            "G": self.group,
            "D": n.head_size,
            "DV": n.value_size,
            "S": n.block_size,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "WINDOW": n.window,
            "SOFTCAP": n.softcap > 0,
            "SINKS": sinks is not None,
            "LSE": lse is not None,
        }

    def _run_decode(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        meta: StepMeta,
        part: DecodePlan,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        n, c = self.need, self.decode
        k_cache, v_cache = cache
        lse_stride = 0 if lse is None else lse.stride(0)
        kernels.decode_kernel[(n.num_kv_heads, part.num_items)](
            q,
            k_cache,
            v_cache,
            meta.block_table,
            part.items,
            out,
            lse,
            sinks,
            part.part_out,
            part.part_lse,
            self.scale,
            self.softcap,
            *q.stride()[:2],
            *out.stride()[:2],
            lse_stride,
            meta.block_table.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            ROWS=part.rows,
            BLOCK_M=self.decode_m,
            BLOCK_N=c.block_n,
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            **self._constants(sinks, lse),
        )
        kernels.merge_kernel[(part.num_reqs * part.rows // self.group, n.num_heads)](
            part.part_out,
            part.part_lse,
            meta.query_start_loc,
            part.first,
            out,
            lse,
            0,
            *out.stride()[:2],
            lse_stride,
            K=n.num_kv_heads,
            G=self.group,
            ROWS=part.rows,
            DV=n.value_size,
            BLOCK_P=16,
            BLOCK_DV=self.block_dv,
            LSE=lse is not None,
            num_warps=4,
        )

    def _run_prefill(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        meta: StepMeta,
        part: PrefillPlan,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        n, c = self.need, part.config
        k_cache, v_cache = cache
        k_desc, v_desc, k_rows, v_rows = k_cache, v_cache, 0, 0
        tma = c.tma and n.block_size % c.block_n == 0
        tma = tma and _whole_rows(k_cache) and _whole_rows(v_cache)
        if tma:
            k_desc, k_rows = _descriptor(k_cache, c.block_n, self.block_d)
            v_desc, v_rows = _descriptor(v_cache, c.block_n, self.block_dv)
        kernels.prefill_kernel[(n.num_kv_heads * part.num_items,)](
            q,
            k_cache,
            v_cache,
            k_desc,
            v_desc,
            meta.block_table,
            part.items,
            out,
            lse,
            sinks,
            part.num_items,
            self.scale,
            self.softcap,
            *q.stride()[:2],
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            meta.block_table.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            k_rows,
            v_rows,
            K=n.num_kv_heads,
            BLOCK_M=c.block_m,
            BLOCK_N=c.block_n,
            TMA=tma,
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            **self._constants(sinks, lse),
        )


def _check_rows(name: str, x: torch.Tensor, num_heads: int, size: int) -> None:
    if x.dim() != 3 or x.shape[1] != num_heads or x.shape[2] != size or x.stride(2) != 1:
        raise ValueError(
            f"attention: {name} must be [T, {num_heads}, {size}] with a contiguous last "
            f"dimension, got shape {tuple(x.shape)} and strides {tuple(x.stride())}"
        )


def _whole_rows(cache: torch.Tensor) -> bool:
    """Whether the cache [N, K, S, D] is rows of D with a block stride of whole rows."""
    size, dim = cache.shape[2:]
    return cache.stride(0) % dim == 0 and cache.stride()[1:] == (size * dim, dim, 1)


def _descriptor(cache: torch.Tensor, block_n: int, block_d: int) -> tuple[TensorDescriptor, int]:
    """The cache as rows [N * stride / D, D] for the copy engine, and rows from block to block."""
    num_blocks, num_heads, size, dim = cache.shape
    step = cache.stride(0) // dim
    rows = (num_blocks - 1) * step + num_heads * size
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [block_n, block_d]), step
