"""Paged attention in plain torch, for any device, head size and block size.

Per request, the visible part of the cache is gathered into dense rows (from the first block of
the window, never an unused slot on a host), then either torch's fused attention runs on it, or,
for sinks, softcap, an LSE or a device, the formula in float32. It is the fallback everywhere and
what other backends are measured against; it must stay simple.

Tensors: q [T, H, D], k [T, K, D], v [T, K, Dv]; cache parts [N, S, K, D] and [N, S, K, Dv] in the
model's dtype (tokens outermost in a block, so that gathered blocks are rows of tokens).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cardcage.core.contracts import AttentionNeed, KVPart, StepMeta


@dataclass(slots=True)
class RequestPlan:
    """What one request reads in this step. Row ranges are on the host."""

    row: int  # first row of the step
    num_rows: int
    length: int  # keys to gather end here (a host copy: an upper bound on other devices)
    start: int  # position of the first gathered key
    blocks: torch.Tensor  # int64 ids of the blocks that hold [start, length)
    mask: torch.Tensor | None  # bool [num_rows, length - start]; None: see causal
    causal: bool  # the square lower triangle; else no mask means that all keys are seen


@dataclass(slots=True)
class Plan:
    """The requests of one step, and where its new keys and values go."""

    requests: list[RequestPlan]
    block: torch.Tensor  # int64 per written row
    offset: torch.Tensor
    rows: torch.Tensor | None  # rows to write; None = all
    keep: torch.Tensor | None  # bool [T], devices only: rows whose slot is real
    num_tokens: int


class Backend:
    """One attention need in plain torch. Keeps no state between steps."""

    def __init__(self, need: AttentionNeed) -> None:
        self.need = need
        self._fused = not need.sinks and need.softcap == 0.0

    def kv_parts(self) -> tuple[KVPart, ...]:
        n = self.need
        return (
            KVPart("k", (n.block_size, n.num_kv_heads, n.head_size), n.dtype),
            KVPart("v", (n.block_size, n.num_kv_heads, n.value_size), n.dtype),
        )

    def plan(self, meta: StepMeta) -> Plan:
        on_host = meta.seq_lens.device.type == "cpu"
        # On a host the tensors themselves are exact and free to read.
        lens = meta.seq_lens.tolist() if on_host else list(meta.seq_lens_host)
        if on_host:
            starts = meta.query_start_loc.tolist()
            query_lens = [b - a for a, b in itertools.pairwise(starts)]
        else:
            query_lens = list(meta.query_lens_host)
        requests = self._plan_requests(meta, lens, query_lens, on_host)
        slots = meta.slot_mapping
        rows = keep = None
        if on_host:
            valid = slots >= 0
            if not bool(valid.all()):
                rows = torch.nonzero(valid).flatten()
                slots = slots[rows]
        else:
            keep = slots >= 0
            slots = slots.clamp(min=0)
        size = self.need.block_size
        return Plan(requests, slots // size, slots % size, rows, keep, meta.num_tokens)

    def _plan_requests(
        self, meta: StepMeta, lens: Sequence[int], query_lens: Sequence[int], on_host: bool
    ) -> list[RequestPlan]:
        window, size = self.need.window, self.need.block_size
        device = meta.seq_lens.device
        out: list[RequestPlan] = []
        row = 0
        for r in range(meta.num_reqs):
            num_rows, length = query_lens[r], lens[r]
            if num_rows > 0 and length > 0:
                first = length - num_rows
                start = max(0, first - window + 1) if window else 0
                blocks = meta.block_table[r, start // size : -(-length // size)].long()
                mask, causal = None, False
                if not on_host:
                    first_row = meta.seq_lens[r] - num_rows
                    mask = self._mask(first_row, num_rows, start, length, device)
                elif num_rows > 1:
                    causal = first == 0 and (window == 0 or window >= length)
                    if not causal:
                        mask = self._mask(first, num_rows, start, length, device)
                out.append(RequestPlan(row, num_rows, length, start, blocks, mask, causal))
            row += num_rows
        return out

    def _mask(
        self,
        first: int | torch.Tensor,
        num_rows: int,
        start: int,
        length: int,
        device: torch.device,
    ) -> torch.Tensor:
        i = first + torch.arange(num_rows, device=device)[:, None]
        j = torch.arange(start, length, device=device)[None, :]
        visible = j <= i
        if self.need.window:
            visible &= j > i - self.need.window
        return visible

    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: Plan
    ) -> None:
        index = (plan.block, plan.offset)
        for part, new in zip(cache, (k, v), strict=True):
            if plan.rows is not None:
                new = new[plan.rows]
            if plan.keep is not None:
                # A dropped row rewrites what its slot holds: no host sync, no changed byte.
                new = torch.where(plan.keep[:, None, None], new, part[index])
            part.index_put_(index, new.to(part.dtype))

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
        if out is None:
            out = q.new_empty(q.shape[0], n.num_heads, n.value_size)
        covered = sum(p.num_rows for p in plan.requests)
        if covered < q.shape[0]:  # padding rows and requests without a key
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
                if sinks is not None:
                    lse.copy_(sinks.to(lse.dtype)[:, None].expand_as(lse))
        for p in plan.requests:
            rows = slice(p.row, p.row + p.num_rows)
            k, v = (self._gather(part, p) for part in cache)
            if self._fused and lse is None and q.device.type == "cpu":
                out[rows] = self._fused_rows(q[rows], k, v, p)
            else:
                result, row_lse = self._formula_rows(q[rows], k, v, p, sinks)
                out[rows] = result.to(out.dtype)
                if lse is not None:
                    lse[:, rows] = row_lse.to(lse.dtype)
        return out

    def _gather(self, part: torch.Tensor, p: RequestPlan) -> torch.Tensor:
        """[length - start, K, D]: the cache rows of one request, in order."""
        rows = part.index_select(0, p.blocks).flatten(0, 1)
        skip = p.start % self.need.block_size
        return rows[skip : skip + p.length - p.start]

    def _fused_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: RequestPlan
    ) -> torch.Tensor:
        n = self.need
        group = n.num_heads // n.num_kv_heads
        num_rows = q.shape[0]
        kt, vt = k.transpose(0, 1), v.transpose(0, 1)  # [K, L, D]
        if num_rows == 1 and p.mask is None:
            grouped = q.view(1, n.num_kv_heads, group, n.head_size)
            result = F.scaled_dot_product_attention(
                grouped, kt.unsqueeze(0), vt.unsqueeze(0), scale=n.scale
            )
            return result.reshape(1, n.num_heads, n.value_size)
        # KV heads as the batch, the group as heads: keys are shared without a copy.
        grouped = q.reshape(num_rows, n.num_kv_heads, group, n.head_size).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            grouped,
            kt.unsqueeze(1).expand(-1, group, -1, -1),
            vt.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=p.mask,
            is_causal=p.causal,
            scale=n.scale,
        )
        return result.permute(2, 0, 1, 3).reshape(num_rows, n.num_heads, n.value_size)

    def _formula_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        p: RequestPlan,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, H, Dv] and lse [H, T] in float32 (float64 for float64 inputs)."""
        n = self.need
        acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        group = n.num_heads // n.num_kv_heads
        num_rows = q.shape[0]
        grouped = q.reshape(num_rows, n.num_kv_heads, group, n.head_size).permute(1, 2, 0, 3)
        kt, vt = k.transpose(0, 1).to(acc), v.transpose(0, 1).to(acc)
        scores = grouped.to(acc) @ kt.unsqueeze(1).transpose(2, 3) * n.scale  # [K, G, T, L]
        if n.softcap > 0:
            scores = n.softcap * torch.tanh(scores / n.softcap)
        mask = p.mask
        if p.causal:
            mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).tril_()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
            # A slot that no row sees may hold NaN, and NaN * 0 is NaN.
            vt = vt.masked_fill(~mask.any(dim=0)[:, None], 0.0)
        lse = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            extra = sinks.to(acc).view(n.num_kv_heads, group, 1)
            lse = torch.logaddexp(lse, extra)
        weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse).unsqueeze(-1))
        result = weights @ vt.unsqueeze(1)
        out = result.permute(2, 0, 1, 3).reshape(num_rows, n.num_heads, n.value_size)
        return out, lse.reshape(n.num_heads, num_rows)
