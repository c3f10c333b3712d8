"""The backend object: cuts a step into tasks and calls the compiled kernel once a layer.

`plan` reads the step's index tensors (they are on the host) and makes the task list; `forward`
fills in what changes with the layer and makes one call. Threads are torch's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cardcage.core.contracts import AttentionNeed, KVPart, StepMeta

from . import native

TASK_ROWS = 48  # (token, head) rows of a prefill task: its float32 state stays in the L1 cache
SERIAL_WORK = 300_000  # multiply-adds below which starting threads costs more than it saves
UNITS_PER_THREAD = 3  # work units wanted per thread, so that they end together
KEYS = 64  # keys of a tile in kernels.c

_POINTERS = ("q", "k_cache", "v_cache", "out", "sinks", "lse")
_LAYER = ("q_st", "q_sh", "out_st", "out_sh", "lse_sh", "kc_sb", "vc_sb")
_STEP = ("num_tasks", "table_sr", "segments", "threads")
_FIXED = (
    "num_kv_heads",
    "group",
    "head_size",
    "value_size",
    "block_size",
    "window",
    "rows_max",
)


class Args(ctypes.Structure):
    """`Args` of kernels.c, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _LAYER),
        *((name, ctypes.c_void_p) for name in ("tasks", "block_table")),
        *((name, ctypes.c_int64) for name in _STEP),
        *((name, ctypes.c_void_p) for name in ("scratch", "parts")),
        *((name, ctypes.c_int64) for name in _FIXED),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(slots=True)
class Plan:
    """One step. Owns the memory that `args` points at."""

    args: Args
    tasks: np.ndarray
    meta: StepMeta
    scratch: torch.Tensor
    parts: torch.Tensor | None
    rows: int  # rows of the step that belong to a request


class Backend:
    """One attention need on a host."""

    def __init__(self, need: AttentionNeed, data_dir: Path) -> None:
        self.need = need
        self.group = need.num_heads // need.num_kv_heads
        self.dtype: torch.dtype = getattr(torch, need.dtype)
        library = native.load(need.dtype == "bfloat16", Path(data_dir) / "native")
        self._forward = library.forward
        self._forward.argtypes = (ctypes.POINTER(Args),)
        self._forward.restype = None
        self._write = library.write_rows
        self._write.argtypes = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 12)
        self._write.restype = None
        self._scratch_floats = library.scratch_floats
        self._scratch_floats.argtypes = (ctypes.c_int64,) * 3
        self._scratch_floats.restype = ctypes.c_int64
        self._scratch = torch.empty(0)
        self._parts = torch.empty(0)

    def kv_parts(self) -> tuple[KVPart, ...]:
        n = self.need
        return (
            # Keys innermost: a vector register holds one dimension of several keys.
            KVPart("k", (n.num_kv_heads, n.head_size, n.block_size), n.dtype),
            KVPart("v", (n.num_kv_heads, n.block_size, n.value_size), n.dtype),
        )

    def plan(self, meta: StepMeta) -> Plan:
        n = self.need
        starts = meta.query_start_loc.numpy()
        query_lens = np.diff(starts)
        seq_lens = meta.seq_lens.numpy()
        tokens = max(1, TASK_ROWS // self.group)  # query tokens of a task
        tokens = min(tokens, max(1, meta.max_query_len))
        tasks, keys = self._tasks(starts, query_lens, seq_lens, tokens)
        work = int((tasks[:, 2] * keys).sum()) * n.num_heads * (n.head_size + n.value_size)
        threads = torch.get_num_threads() if work > SERIAL_WORK else 1
        units = len(tasks) * n.num_kv_heads
        segments = 1
        if threads > 1 and 0 < units < UNITS_PER_THREAD * threads:
            wanted = -(-UNITS_PER_THREAD * threads // units)
            segments = min(wanted, max(1, int(keys.max()) // (2 * KEYS)))
        rows_max = tokens * self.group
        args = Args(
            tasks=tasks.ctypes.data,
            block_table=meta.block_table.data_ptr(),
            num_tasks=len(tasks),
            table_sr=meta.block_table.stride(0),
            segments=segments,
            threads=threads,
            num_kv_heads=n.num_kv_heads,
            group=self.group,
            head_size=n.head_size,
            value_size=n.value_size,
            block_size=n.block_size,
            window=n.window,
            rows_max=rows_max,
            scale=n.scale,
            softcap=n.softcap,
        )
        floats = threads * self._scratch_floats(rows_max, n.head_size, n.value_size)
        self._scratch = _at_least(self._scratch, floats)
        args.scratch = self._scratch.data_ptr()
        parts = None
        if segments > 1:
            floats = units * segments * rows_max * (n.value_size + 2)
            parts = self._parts = _at_least(self._parts, floats)
            args.parts = parts.data_ptr()
        return Plan(args, tasks, meta, self._scratch, parts, int(starts[meta.num_reqs]))

    def _tasks(
        self, starts: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 [num_tasks, 4] (see kernels.c) and the keys that each reads; long ones first."""
        counts = -(-query_lens // tokens)
        request = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = index * tokens
        num = np.minimum(tokens, query_lens[request] - at)
        position = seq_lens[request] - query_lens[request] + at
        keys = np.maximum(position + num, 0)
        if self.need.window:
            keys = np.minimum(keys, self.need.window + num - 1)
        tasks = np.stack([request, starts[request] + at, num, position], axis=1).astype(np.int32)
        order = np.argsort(-num * keys, kind="stable")
        return np.ascontiguousarray(tasks[order]), keys[order]

    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: Plan
    ) -> None:
        n = self.need
        self._check("k", k, n.num_kv_heads, n.head_size)
        self._check("v", v, n.num_kv_heads, n.value_size)
        k_cache, v_cache = cache
        slots = plan.meta.slot_mapping
        num_tokens = slots.shape[0]
        self._write(
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            n.num_kv_heads,
            n.head_size,
            n.value_size,
            n.block_size,
            torch.get_num_threads() if num_tokens > 256 else 1,
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
        self._check("q", q, n.num_heads, n.head_size)
        if out is None:
            out = q.new_empty(q.shape[0], n.num_heads, n.value_size)
        self._check("out", out, n.num_heads, n.value_size)
        if lse is not None and (lse.stride(1) != 1 or lse.dtype != torch.float32):
            raise ValueError("attention: lse must be float32 [H, T] with contiguous rows")
        if plan.rows < q.shape[0]:  # padding behind the last request
            out[plan.rows :].zero_()
        a = plan.args
        a.q, a.out = q.data_ptr(), out.data_ptr()
        a.q_st, a.q_sh, _ = q.stride()
        a.out_st, a.out_sh, _ = out.stride()
        a.k_cache, a.v_cache = cache[0].data_ptr(), cache[1].data_ptr()
        a.kc_sb, a.vc_sb = cache[0].stride(0), cache[1].stride(0)
        extra = None if sinks is None else sinks.float().contiguous()
        a.sinks = None if extra is None else extra.data_ptr()
        a.lse = None if lse is None else lse.data_ptr()
        a.lse_sh = 0 if lse is None else lse.stride(0)
        self._forward(a)
        return out

    def _check(self, name: str, x: torch.Tensor, num_heads: int, size: int) -> None:
        if x.shape[1:] != (num_heads, size) or x.stride(2) != 1 or x.dtype != self.dtype:
            raise ValueError(
                f"attention: {name} must be {self.need.dtype} [T, {num_heads}, {size}] with "
                f"contiguous rows, got {x.dtype} {tuple(x.shape)}, strides {tuple(x.stride())}"
            )


def _at_least(buffer: torch.Tensor, floats: int) -> torch.Tensor:
    return buffer if buffer.numel() >= floats else torch.empty(floats, dtype=torch.float32)
