"""The Triton backend against dense float64 attention.

Without a GPU the kernels run in Triton's interpreter (float32 and float16: its bf16 product is
wrong), with tiny tiles so that several tiles, items and partial results occur. The `gpu` tests run
the tuned shapes in bf16, long contexts, pools past 2^31 elements, and graph capture.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from cardcage.core.contracts import AttentionNeed
from cardcage.plugins.attention.triton_paged import TritonPaged
from tests.contracts.attention_suite import AttentionSuite, Harness, refusals

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels run on the GPU here")


def tiny(need: AttentionNeed, **changes: Any) -> Any:
    """A backend with tiles of 16 keys and at most 2 + R work items."""
    from cardcage.plugins.attention.triton_paged.launcher import Backend
    from cardcage.plugins.attention.triton_paged.tuned import DecodeConfig, PrefillConfig

    return Backend(
        need,
        num_sms=changes.get("num_sms", 2),
        prefill=changes.get("prefill", PrefillConfig(32, 16, 4, 1)),
        decode=changes.get("decode", DecodeConfig(16, 4, 1, 2, 1)),
    )


@interpreted
class TestTritonPaged(AttentionSuite):
    declaration = TritonPaged
    device_type = "cuda"
    arch = (9, 0)
    dtypes = ("float32", "float16")

    def build(self, need: AttentionNeed) -> Any:
        return tiny(need)

    @pytest.mark.parametrize("num_sms", [1, 16])
    def test_split_decode_equals_single_pass(self, num_sms: int) -> None:
        """num_sms 1: one item a request; 16: one key tile an item."""
        need = self.need(num_heads=2, num_kv_heads=1, sinks=True)
        h = Harness(tiny(need, num_sms=num_sms), need, "cpu")
        sinks = torch.tensor([0.3, -0.2])
        h.step([(0, 130), (1, 20)], sinks=sinks)
        h.check(h.step([(0, 1), (1, 1), (2, 1)], sinks=sinks, padding=1))

    def test_few_rows_a_request_run_split(self) -> None:
        """Several query rows a request (drafts to verify) take the split-KV kernel."""
        need = self.need(num_heads=2, num_kv_heads=1)
        h = Harness(tiny(need, num_sms=8), need, "cpu")
        h.step([(0, 90), (1, 17)])
        h.check(h.step([(1, 1), (0, 5), (2, 3)], padding=0))

    @pytest.mark.parametrize("head_size", [32, 48, 80])
    def test_head_sizes(self, head_size: int) -> None:
        h = self.harness(head_size=head_size, num_heads=2, num_kv_heads=1)
        h.check(h.step([(0, 35), (1, 2)]))
        h.check(h.step([(0, 1), (1, 1)]))

    @pytest.mark.parametrize("window", [0, 20])
    def test_copy_engine_tiles(self, window: int) -> None:
        from cardcage.plugins.attention.triton_paged.tuned import PrefillConfig

        need = self.need(num_heads=2, num_kv_heads=1, window=window, head_size=48)
        h = Harness(tiny(need, prefill=PrefillConfig(16, 16, 4, 1, tma=True)), need, "cpu")
        h.check(h.step([(0, 50), (1, 20)]))

    def test_copy_engine_config_on_a_layout_without_whole_rows(self) -> None:
        from cardcage.plugins.attention.triton_paged.launcher import _whole_rows
        from cardcage.plugins.attention.triton_paged.tuned import PrefillConfig

        need = self.need(num_heads=2, num_kv_heads=1, head_size=48, value_size=16)
        h = Harness(tiny(need, prefill=PrefillConfig(16, 16, 4, 1, tma=True)), need, "cpu")
        assert not _whole_rows(h.cache[0])
        h.check(h.step([(0, 50), (1, 20)]))

    def test_wrong_shapes_are_refused(self) -> None:
        h = self.harness()
        plan = h.backend.plan(h.meta([(0, 2)]))
        q = torch.zeros(2, 3, 16)
        with pytest.raises(ValueError, match=r"q must be \[T, 4, 16\]"):
            h.backend.forward(q, h.cache, plan)

    @pytest.mark.parametrize(("seed", "window"), [(0, 0), (1, 37), (2, 0), (2, 37), (3, 37)])
    def test_work_items_cover_every_tile_once(self, seed: int, window: int) -> None:
        """The device's list against a plain Python one, for ragged and empty requests."""
        from cardcage.plugins.attention.triton_paged.reference import decode_items, prefill_items

        gen = torch.Generator().manual_seed(seed)
        num_reqs = [1, 5, 19, 300][seed]
        query_lens = torch.ones(num_reqs, dtype=torch.int32)
        seq_lens = torch.randint(0, 300, (num_reqs,), generator=gen, dtype=torch.int32)
        need = self.need(window=window)
        backend = tiny(need, num_sms=7)
        h = Harness(backend, need, "cpu")
        meta = replace_meta(h, query_lens, seq_lens)
        plan = backend.plan(meta).decode
        got = plan.items[: plan.num_items].tolist()
        target = plan.num_items - num_reqs
        want = decode_items(query_lens.tolist(), seq_lens.tolist(), 16, window, target, 1)
        assert [row for row in got if row[0] >= 0] == want
        assert len(want) <= plan.num_items
        query_lens = torch.randint(0, 40, (num_reqs,), generator=gen, dtype=torch.int32)
        query_lens[0] = 40
        prefill = backend.plan(replace_meta(h, query_lens, query_lens + 3)).prefill
        got = prefill.items[: prefill.num_items].tolist()
        block_q = prefill.config.block_m // backend.group
        want = prefill_items(query_lens.tolist(), (query_lens + 3).tolist(), block_q)
        assert [row[:4] + row[5:] for row in got if row[0] >= 0] == want
        assert len(want) <= prefill.num_items


def replace_meta(h: Harness, query_lens: torch.Tensor, seq_lens: torch.Tensor) -> Any:
    """Index tensors with made-up lengths (the tables are never read by `plan`)."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0)]).to(torch.int32)
    decodes = len(query_lens) if int(query_lens.max()) <= 1 else 0
    return replace(
        h.meta([(0, 1)]),
        num_reqs=len(query_lens),
        num_tokens=int(starts[-1]),
        num_decodes=decodes,
        max_query_len=int(query_lens.max()),
        query_start_loc=starts,
        seq_lens=seq_lens.to(torch.int32),
    )


class TestCaps:
    """Needs outside the caps are refused by the data alone."""

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"device_type": "cpu"}, "device_type"),
            ({"arch": (7, 5)}, "arch"),
            ({"dtype": "float64"}, "dtype"),
            ({"head_size": 260}, "head_size"),
            ({"head_size": 72}, "head_size"),
            ({"value_size": 512}, "value_size"),
            ({"block_size": 20}, "block_size"),
            ({"group_size": 65}, "group_size"),
            ({"kv_format": "fp8"}, "kv_format"),
            ({"op": "mla"}, "op"),
            ({"features": frozenset({"non_causal"})}, "features"),
        ],
    )
    def test_refusals_name_the_field(self, changes: dict[str, Any], word: str) -> None:
        base = AttentionNeed(device_type="cuda", arch=(9, 0), dtype="bfloat16")
        assert refusals(TritonPaged.caps, base) == []
        reasons = refusals(TritonPaged.caps, replace(base, **changes))
        assert len(reasons) == 1
        assert reasons[0].startswith(word)

    def test_a_scale_that_is_not_positive_is_refused(self) -> None:
        need = AttentionNeed(device_type="cuda", arch=(9, 0), dtype="bfloat16", scale=0.0)
        assert "scale" in TritonPaged().reasons_against(need)[0]

    def test_declaration_imports_nothing_heavy(self) -> None:
        import subprocess
        import sys

        code = (
            "import sys, cardcage.plugins.attention.triton_paged, "
            "cardcage.plugins.attention.torch_reference\n"
            "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestTunedTable:
    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("dim", [16, 64, 128, 256])
    def test_every_row_fits_the_shared_memory(self, dim: int, size: int) -> None:
        from cardcage.plugins.attention.triton_paged import tuned

        for arch, limit in tuned.SHARED_BYTES.items():
            p = tuned.prefill_config(arch, dim, dim, size)
            d = tuned.decode_config(arch, dim, dim, size)
            assert (p.block_m + 2 * p.block_n * p.num_stages) * dim * size <= limit
            assert 2 * d.block_n * d.num_stages * dim * size <= limit

    def test_unknown_chips_take_the_nearest_older_row(self) -> None:
        from cardcage.plugins.attention.triton_paged import tuned

        new, old = (tuned.decode_config(arch, 128, 128, 2) for arch in ((9, 9), (9, 0)))
        assert (new.block_n, new.num_warps) == (old.block_n, old.num_warps)
        assert tuned.prefill_config((), 128, 128, 2).block_m > 0


def on_gpu(need: AttentionNeed, **configs: Any) -> Any:
    from cardcage.plugins.attention.triton_paged.launcher import Backend

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Backend(need, num_sms=num_sms, **configs)


MODELS = {"qwen3-0.6b": (16, 8), "llama-3.1-8b": (32, 8), "qwen3-30b-a3b": (32, 4)}


@pytest.mark.gpu
class TestTritonPagedOnGpu(AttentionSuite):
    declaration = TritonPaged
    device = "cuda"
    arch = (8, 0)
    dtypes = ("bfloat16", "float16", "float32")
    head_size = 64

    def need(self, **changes: Any) -> AttentionNeed:
        return super().need(arch=torch.cuda.get_device_capability(), **changes)

    def build(self, need: AttentionNeed) -> Any:
        return on_gpu(need)

    @pytest.mark.parametrize("block_size", [16, 64])
    @pytest.mark.parametrize("model", sorted(MODELS))
    def test_model_shapes(self, model: str, block_size: int) -> None:
        heads, kv_heads = MODELS[model]
        h = self.harness(
            num_heads=heads, num_kv_heads=kv_heads, head_size=128, block_size=block_size,
            num_blocks=2048 // block_size,
        )  # fmt: skip
        h.max_blocks = 1024 // block_size
        h.check(h.step([(0, 700), (1, 130), (2, 3)]))
        h.check(h.step([(0, 1), (1, 1), (2, 1), (3, 257)]))
        h.check(h.step([(0, 1), (1, 1), (2, 1), (3, 1)], padding=4))

    @pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
    def test_head_sizes(self, head_size: int, dtype: str) -> None:
        h = self.harness(head_size=head_size, dtype=dtype)
        h.check(h.step([(0, 150), (1, 20)]))
        h.check(h.step([(0, 1), (1, 1)]))

    @pytest.mark.parametrize("window", [0, 100])
    def test_copy_engine_tiles(self, window: int) -> None:
        from cardcage.plugins.attention.triton_paged.tuned import PrefillConfig

        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("needs a copy engine (sm_90)")
        need = self.need(head_size=128, block_size=64, window=window)
        backend = on_gpu(need, prefill=PrefillConfig(128, 64, 8, 3, tma=True))
        h = Harness(backend, need, "cuda")
        h.check(h.step([(0, 500), (1, 77)]))
        h.check(h.step([(0, 1), (1, 200)]))

    def test_context_of_40k_tokens(self) -> None:
        h = self.harness(num_heads=8, num_kv_heads=2, head_size=128, num_blocks=5200)
        h.max_blocks = 2600
        h.context(0, 40_000)
        h.context(1, 40_957)
        h.context(2, 17)
        h.check(h.step([(0, 1), (1, 1), (2, 1)]))
        h.check(h.step([(2, 1), (0, 64), (1, 3)]))

    def test_pool_past_32_bit_offsets(self) -> None:
        need = self.need(num_heads=8, num_kv_heads=2, head_size=128)
        if torch.cuda.mem_get_info()[0] < 12 << 30:
            pytest.skip("needs 12 GiB of device memory")
        h = Harness(on_gpu(need), need, "cuda", pages_apart=4800)
        h.max_blocks = 32
        assert h.pool.nbytes // 2 > 2**31
        h.check(h.step([(0, 300), (1, 200)]))
        h.check(h.step([(0, 1), (1, 1)]))

    @pytest.mark.parametrize("plan_inside", [True, False])
    def test_captured_step_replays_with_other_lengths(self, plan_inside: bool) -> None:
        h = self.harness(num_heads=8, num_kv_heads=2, head_size=128, num_blocks=256)
        h.max_blocks = 64
        n = h.need
        for request, length in enumerate((500, 3, 64, 129)):
            h.context(request, length)
        rows = [(r, 1) for r in range(4)]
        static = h.meta(rows, padding=2)
        q = torch.empty(6, n.num_heads, n.head_size, dtype=h.dtype, device="cuda")
        k = torch.empty(6, n.num_kv_heads, n.head_size, dtype=h.dtype, device="cuda")
        v, out = torch.empty_like(k), torch.empty_like(q)
        for x in (q, k, v):
            x.zero_()
        static.slot_mapping.fill_(-1)  # the warm-up must not write

        def run(plan: Any) -> None:
            h.backend.write(k, v, h.cache, plan)
            h.backend.forward(q, h.cache, plan, out=out)

        run(h.backend.plan(static))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        plan = h.backend.plan(static)
        with torch.cuda.graph(graph):
            run(h.backend.plan(static) if plan_inside else plan)
        for _ in range(3):
            meta = h.meta(rows, padding=2)
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
                getattr(static, name).copy_(getattr(meta, name))
            for x in (q, k, v):
                x.copy_(h.random(*x.shape))
            if not plan_inside:
                h.backend.plan(static)
            graph.replay()
            for r in range(4):
                h._remember(r, k[r : r + 1], v[r : r + 1])
            h._last = (q, rows, None)
            h.check((out, None))

    def test_steps_do_not_synchronise(self) -> None:
        h = self.harness(head_size=128)
        h.step([(0, 40), (1, 3)])
        meta = h.meta([(0, 1), (1, 20)])
        n = h.need
        q = h.random(21, n.num_heads, n.head_size)
        k = h.random(21, n.num_kv_heads, n.head_size)
        h.backend.forward(q, h.cache, h.backend.plan(meta))  # compiled now
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan = h.backend.plan(meta)
            h.backend.write(k, k, h.cache, plan)
            h.backend.forward(q, h.cache, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
