"""What every attention backend must do, as a test class to subclass.

    class TestMine(AttentionSuite):
        declaration = MyAttention          # the class that the entry point names
        device = "cuda"
        dtypes = ("float16", "bfloat16")

The suite drives a backend as an executor does: a strided pool full of NaN, shuffled block ids, a
null block, `plan` then `write` then `forward`, and compares each step with dense float64
attention. Features that the declaration does not list are skipped; a need outside its caps must
be refused with a reason. Override `build` when the backend needs more than a bare context.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cardcage.core.contracts import AttentionNeed, PluginContext, StepMeta
from cardcage.plugins.attention.torch_reference.reference import dense_attention

# Absolute and relative error against float64 on unit-variance inputs.
TOLERANCE: dict[str, tuple[float, float]] = {
    "float32": (1e-5, 1e-5),
    "float16": (4e-3, 4e-3),
    "bfloat16": (2e-2, 1e-2),
}
STALE = 1  # a real block that table entries past a request's end name, as reused rows do


def needs(feature: str) -> Callable[[Any], Any]:
    """Marks a test of the suite that only runs when the declaration lists `feature`."""

    def mark(test: Any) -> Any:
        test.needs = (*getattr(test, "needs", ()), feature)
        return test

    return mark


def refusals(caps: Any, need: Any) -> list[str]:
    """Why a need does not fit, field by field; [] when it fits."""
    out = []
    for name in need.__dataclass_fields__:
        have, want = getattr(caps, name, None), getattr(need, name)
        if name == "features":
            missing = sorted(want - have)
            out += [f"features {missing} are missing"] if missing else []
        elif have is None or want is None:
            continue
        elif isinstance(have, frozenset):
            out += [] if want in have else [f"{name} {want} is not one of {sorted(have)}"]
        elif hasattr(have, "reason") and (reason := have.reason(name, want)):
            out.append(reason)
    return out


class Harness:
    """One backend with one layer's cache, driven over steps; keeps the dense truth beside it."""

    def __init__(
        self,
        backend: Any,
        need: AttentionNeed,
        device: str,
        *,
        num_blocks: int = 64,
        max_blocks: int = 16,
        pages_apart: int = 2,
        seed: int = 0,
    ) -> None:
        self.backend, self.need, self.device = backend, need, device
        self.dtype = getattr(torch, need.dtype)
        self.gen = torch.Generator().manual_seed(seed)
        self.max_blocks = max_blocks
        self._make_cache(num_blocks, pages_apart)
        order = torch.randperm(num_blocks - 2, generator=self.gen) + 2
        self.free = order.tolist()
        self.tables: dict[int, list[int]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def _make_cache(self, num_blocks: int, pages_apart: int) -> None:
        """Views over one byte pool whose pages hold more than this layer (as layers do)."""
        offsets, end = [], 0
        for part in self.backend.kv_parts():
            offsets.append(end)
            size = torch.empty(part.shape, dtype=getattr(torch, part.dtype)).nbytes
            end += -(-size // 64) * 64
        page = end * pages_apart
        # 0xff bytes are NaN in every float format.
        self.pool = torch.full((num_blocks * page,), 255, dtype=torch.uint8, device=self.device)
        views = []
        for part, offset in zip(self.backend.kv_parts(), offsets, strict=True):
            typed = self.pool.view(getattr(torch, part.dtype))
            size = typed.element_size()
            inner = torch.empty(part.shape).stride()
            views.append(
                typed.as_strided((num_blocks, *part.shape), (page // size, *inner), offset // size)
            )
        self.cache = tuple(views)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.gen).to(self.dtype).to(self.device)

    def length(self, request: int) -> int:
        return len(self.keys[request]) if request in self.keys else 0

    def _grow(self, request: int, length: int) -> None:
        table = self.tables.setdefault(request, [])
        while len(table) * self.need.block_size < length:
            table.append(self.free.pop())

    def release_left_of_window(self, request: int) -> None:
        """Frees the blocks that no later row reads, as the window cache kind does."""
        first = self.length(request) - self.need.window + 1
        table = self.tables[request]
        for b in range(min(len(table), max(0, first) // self.need.block_size)):
            if table[b]:
                for part in self.cache:
                    part[table[b]] = float("nan")
                self.free.append(table[b])
                table[b] = 0

    def meta(self, rows: Sequence[tuple[int, int]], padding: int = 0) -> StepMeta:
        """Index tensors for (request, number of rows) pairs, decode rows already first."""
        size = self.need.block_size
        query_lens = [n for _, n in rows] + [1] * padding
        seq_lens = [self.length(r) + n for r, n in rows] + [0] * padding
        table = torch.full((len(query_lens), self.max_blocks), STALE, dtype=torch.int32)
        slots: list[int] = []
        for i, (request, n) in enumerate(rows):
            self._grow(request, seq_lens[i])
            ids = self.tables[request]
            table[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            first = seq_lens[i] - n
            slots += [ids[p // size] * size + p % size for p in range(first, first + n)]
        slots += [-1] * padding
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        return StepMeta(
            num_reqs=len(query_lens),
            num_tokens=len(slots),
            num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
            max_query_len=max(query_lens),
            max_seq_len=self.max_blocks * size,
            query_start_loc=starts.to(self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(self.device),
            block_table=table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(self.device),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def step(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        padding: int = 0,
        sinks: torch.Tensor | None = None,
        with_lse: bool = True,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step as an executor runs it. Returns out [T, H, Dv] and lse [H, T]."""
        n = self.need
        meta = self.meta(rows, padding)
        total = meta.num_tokens
        if qkv is None:
            # One fused tensor, as a fused projection gives it: q, k and v are strided views.
            width = n.num_heads * n.head_size + n.num_kv_heads * (n.head_size + n.value_size)
            fused = self.random(total, width)
            cut = n.num_heads * n.head_size, n.num_kv_heads * n.head_size
            q = fused[:, : cut[0]].view(total, n.num_heads, n.head_size)
            k = fused[:, cut[0] : sum(cut)].view(total, n.num_kv_heads, n.head_size)
            v = fused[:, sum(cut) :].view(total, n.num_kv_heads, n.value_size)
        else:
            q, k, v = qkv
        plan = self.backend.plan(meta)
        self.backend.write(k, v, self.cache, plan)
        lse = None
        if with_lse:
            lse = torch.full((n.num_heads, total), float("nan"), device=self.device)
        result = self.backend.forward(q, self.cache, plan, out=out, sinks=sinks, lse=lse)
        at = 0
        for request, count in rows:
            self._remember(request, k[at : at + count], v[at : at + count])
            at += count
        self._last = (q, list(rows), sinks)
        return result, lse

    def context(self, request: int, length: int) -> None:
        """Puts `length` tokens of a request in the cache without attending."""
        n = self.need
        k = self.random(length, n.num_kv_heads, n.head_size)
        v = self.random(length, n.num_kv_heads, n.value_size)
        plan = self.backend.plan(self.meta([(request, length)]))
        self.backend.write(k, v, self.cache, plan)
        self._remember(request, k, v)

    def _remember(self, request: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for store, new in ((self.keys, k), (self.values, v)):
            new = new.double().cpu()
            store[request] = torch.cat([store[request], new]) if request in store else new

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 truth for the last step, padding rows included (0 and -inf, or the sink)."""
        q, rows, sinks = self._last
        n = self.need
        out = torch.zeros(q.shape[0], n.num_heads, n.value_size, dtype=torch.float64)
        lse = torch.full((n.num_heads, q.shape[0]), float("-inf"), dtype=torch.float64)
        if sinks is not None:
            lse = sinks.double().cpu()[:, None].repeat(1, q.shape[0])
        at = 0
        for request, count in rows:
            part = slice(at, at + count)
            out[part], lse[:, part] = dense_attention(
                q[part].cpu(),
                self.keys[request],
                self.values[request],
                first_position=self.length(request) - count,
                scale=n.scale,
                window=n.window,
                softcap=n.softcap,
                sinks=None if sinks is None else sinks.cpu(),
            )
            at += count
        return out, lse

    def check(self, result: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Fails unless the step's result is within the dtype's tolerance of the truth."""
        out, lse = result
        want_out, want_lse = self.expected()
        atol, rtol = TOLERANCE[self.need.dtype]
        torch.testing.assert_close(out.cpu().double(), want_out, atol=atol, rtol=rtol)
        if lse is not None:
            torch.testing.assert_close(lse.cpu().double(), want_lse, atol=atol, rtol=rtol)


class AttentionSuite:
    """Subclass, set `declaration`, and every test below runs against it."""

    declaration: ClassVar[Any]
    device: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = ""  # what the need says, when it is not what `device` is
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    head_size: ClassVar[int] = 16
    block_size: ClassVar[int] = 16
    arch: ClassVar[tuple[int, ...]] = ()

    # ---- to override where a backend needs more

    def build(self, need: AttentionNeed) -> Any:
        return self.declaration().build(need, self.context(), None)

    def context(self) -> PluginContext:
        return PluginContext(
            logger=logging.getLogger("attention"),
            config={},
            clock=time.monotonic,
            data_dir=Path("."),
        )

    # ---- helpers

    def need(self, **changes: Any) -> AttentionNeed:
        base = {
            "device_type": self.device_type or self.device.split(":")[0],
            "arch": self.arch,
            "dtype": self.dtypes[0],
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": self.head_size,
            "block_size": self.block_size,
        } | changes
        base.setdefault("value_size", base["head_size"])
        base.setdefault("group_size", base["num_heads"] // base["num_kv_heads"])
        base.setdefault("scale", base["head_size"] ** -0.5)
        return AttentionNeed(**base)

    def harness(self, *, seed: int = 0, num_blocks: int = 64, **changes: Any) -> Harness:
        need = self.need(**changes)
        return Harness(self.build(need), need, self.device, num_blocks=num_blocks, seed=seed)

    @pytest.fixture(autouse=True)
    def _needs_feature(self, request: pytest.FixtureRequest) -> None:
        for feature in getattr(request.function, "needs", ()):
            if feature not in self.declaration.caps.features:
                pytest.skip(f"{self.declaration.name} does not declare {feature}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

    # ---- the tests

    def test_cache_parts_cover_a_block(self) -> None:
        need = self.need()
        parts = self.build(need).kv_parts()
        assert len({p.name for p in parts}) == len(parts)
        for part in parts:
            assert getattr(torch, part.dtype).itemsize > 0
            assert need.block_size in part.shape

    @pytest.mark.parametrize("with_lse", [True, False])
    def test_mixed_batch(self, dtype: str, with_lse: bool) -> None:
        h = self.harness(dtype=dtype)
        size = h.need.block_size
        for rows in (
            [(2, 1), (0, size + 3), (1, 2 * size), (3, 5)],
            [(0, 1), (2, 1), (3, 1), (1, 7), (4, size + 1)],
            [(4, 1), (1, 1), (0, 1), (2, 1), (3, 1)],
        ):
            h.check(h.step(rows, with_lse=with_lse))

    @pytest.mark.parametrize("extra", [1, -1, 0, 2, 7])
    def test_lengths_around_a_block(self, extra: int) -> None:
        h = self.harness(seed=extra + 1)
        length = max(1, h.need.block_size + extra) if extra != 2 else 37
        h.check(h.step([(0, length)]))
        h.check(h.step([(0, 1)]))

    @pytest.mark.parametrize("chunks", [(17, 12), (1, 28), (16, 13), (5, 11, 13), (1,) * 8])
    def test_chunk_invariance(self, chunks: tuple[int, ...]) -> None:
        total = sum(chunks)
        whole = self.harness(seed=3)
        n = whole.need
        q = whole.random(total, n.num_heads, n.head_size)
        k = whole.random(total, n.num_kv_heads, n.head_size)
        v = whole.random(total, n.num_kv_heads, n.value_size)
        want, _ = whole.step([(0, total)], qkv=(q, k, v))
        parts = self.harness(seed=4)
        got, at = [], 0
        for count in chunks:
            rows = slice(at, at + count)
            out, _ = parts.step([(9, count)], qkv=(q[rows], k[rows], v[rows]))
            got.append(out)
            at += count
        atol, rtol = TOLERANCE[n.dtype]
        torch.testing.assert_close(torch.cat(got), want, atol=2 * atol, rtol=2 * rtol)

    @needs("window")
    @pytest.mark.parametrize("with_lse", [True, False])
    @pytest.mark.parametrize("window", [1, 15, 16, 17, 100])
    def test_window(self, window: int, with_lse: bool) -> None:
        h = self.harness(window=window, seed=window)
        h.check(h.step([(0, 40), (1, 3)], with_lse=with_lse))
        h.release_left_of_window(0)
        h.check(h.step([(0, 1), (1, 5)], with_lse=with_lse))
        h.release_left_of_window(0)
        h.check(h.step([(1, 1), (0, 9)], with_lse=with_lse))

    @needs("window")
    def test_decode_at_the_window_edge(self) -> None:
        h = self.harness(window=16)
        h.step([(0, 15), (1, 16)])
        h.check(h.step([(0, 1), (1, 1)]))  # lengths W and W + 1
        h.check(h.step([(0, 1), (1, 1)]))

    @pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
    def test_group_sizes(self, group: int) -> None:
        h = self.harness(num_heads=2 * group, num_kv_heads=2, seed=group)
        h.check(h.step([(0, 20), (1, 3)]))
        h.check(h.step([(0, 1), (1, 1), (2, 18)]))

    @needs("sinks")
    def test_sinks(self, dtype: str) -> None:
        h = self.harness(dtype=dtype, sinks=True)
        sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], device=self.device)
        h.check(h.step([(0, 19), (1, 4)], sinks=sinks))
        h.check(h.step([(0, 1), (1, 1), (2, 3)], sinks=sinks, padding=0))

    @needs("sinks")
    def test_a_sink_of_minus_infinity_is_no_sink(self) -> None:
        h = self.harness(sinks=True)
        sinks = torch.full((4,), float("-inf"), device=self.device)
        h.check(h.step([(0, 19)], sinks=sinks))
        h.check(h.step([(0, 1)], sinks=sinks, padding=2))

    @needs("sinks")
    def test_a_huge_sink_takes_everything(self) -> None:
        h = self.harness(sinks=True)
        sinks = torch.full((4,), 1e5, device=self.device)
        for rows in ([(0, 19)], [(0, 1)]):
            out, _ = h.step(rows, sinks=sinks)
            assert torch.equal(out, torch.zeros_like(out))

    @needs("sinks")
    @needs("window")
    def test_sinks_with_a_window(self) -> None:
        h = self.harness(sinks=True, window=9, seed=5)
        sinks = torch.randn(4, generator=h.gen).to(self.device)
        h.check(h.step([(0, 40)], sinks=sinks))
        h.release_left_of_window(0)
        h.check(h.step([(0, 1), (1, 11)], sinks=sinks))

    @needs("softcap")
    def test_softcap(self, dtype: str) -> None:
        h = self.harness(dtype=dtype, softcap=2.0, scale=1.0)
        h.check(h.step([(0, 33), (1, 2)]))
        h.check(h.step([(0, 1), (1, 1)]))

    def test_padding_rows_see_nothing_and_write_nothing(self) -> None:
        h = self.harness()
        h.step([(0, 18), (1, 1)])
        before = h.pool.clone()
        plan_rows = [(1, 1), (0, 1)]
        result = h.step(plan_rows, padding=3)
        h.check(result)
        changed = torch.nonzero(before != h.pool).flatten()
        page = len(h.pool) // h.cache[0].shape[0]
        allowed = {h.tables[r][(h.length(r) - 1) // h.need.block_size] for r in (0, 1)}
        assert set((changed // page).tolist()) <= allowed
        assert not torch.isnan(result[0]).any()

    def test_write_touches_only_its_slots(self) -> None:
        h = self.harness()
        h.step([(0, 5)])
        page = len(h.pool) // h.cache[0].shape[0]
        touched = set((torch.nonzero(h.pool != 255).flatten() // page).tolist())
        assert touched == {h.tables[0][0]}
        for part in h.cache:
            stored = part[h.tables[0][0]].float()
            n = h.need
            assert int((~torch.isnan(stored)).sum()) == 5 * n.num_kv_heads * n.head_size

    def test_value_size_may_differ(self) -> None:
        need = self.need(head_size=32, value_size=16)
        if refusals(self.declaration.caps, need):
            pytest.skip("value_size 16 beside head_size 32 is outside the caps")
        h = self.harness(head_size=32, value_size=16)
        h.check(h.step([(0, 20), (1, 2)]))
        h.check(h.step([(0, 1), (1, 1)]))

    def test_result_goes_where_it_is_asked(self) -> None:
        h = self.harness()
        n = h.need
        out = torch.full((4, n.num_heads, n.value_size), 7.0, dtype=h.dtype, device=self.device)
        result, _ = h.step([(0, 4)], out=out)
        assert result.data_ptr() == out.data_ptr()
        h.check((out, None))

    def test_lse_does_not_change_the_result(self) -> None:
        one, two = self.harness(seed=8), self.harness(seed=8)
        for rows in ([(0, 21)], [(0, 1), (1, 2)]):
            with_lse, _ = one.step(rows)
            without, _ = two.step(rows, with_lse=False)
            atol, rtol = TOLERANCE[one.need.dtype]
            torch.testing.assert_close(with_lse, without, atol=atol, rtol=rtol)

    @pytest.mark.parametrize("size", [16, 32, 64])
    def test_block_sizes(self, size: int) -> None:
        if refusals(self.declaration.caps, self.need(block_size=size)):
            pytest.skip(f"block_size {size} is outside the caps")
        h = self.harness(block_size=size, num_blocks=16, seed=size)
        h.check(h.step([(0, 70), (1, 9)]))
        h.check(h.step([(0, 1), (1, 1)]))

    def test_the_basic_need_fits(self) -> None:
        assert refusals(self.declaration.caps, self.need()) == []

    def test_needs_outside_the_caps_are_refused_with_a_reason(self) -> None:
        caps, need = self.declaration.caps, self.need()
        wrong = [
            replace(need, op="mla"),
            replace(need, kv_format="no_such_format"),
            replace(need, features=frozenset({"no_such_feature"})),
        ]
        for bad in wrong:
            reasons = refusals(caps, bad)
            assert reasons, bad
            assert all(isinstance(r, str) and r for r in reasons)

    def test_query_heads_must_divide(self) -> None:
        bad = replace(self.need(), num_heads=5, num_kv_heads=2)
        assert self.declaration().reasons_against(bad)
