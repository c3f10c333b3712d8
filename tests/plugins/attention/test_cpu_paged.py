"""The compiled host backend against dense float64 attention."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cardcage.core.contracts import AttentionNeed, PluginContext
from cardcage.core.errors import PluginLoadError
from cardcage.plugins.attention.cpu_paged import COMPILERS, CpuPaged
from tests.contracts.attention_suite import AttentionSuite, Harness

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in COMPILERS), reason="no C compiler"
)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


class TestCpuPaged(AttentionSuite):
    declaration = CpuPaged
    dtypes = ("float32", "bfloat16")

    @pytest.fixture(autouse=True)
    def _cache(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def context(self) -> PluginContext:
        return PluginContext(
            logger=logging.getLogger("attention"),
            config={},
            clock=time.monotonic,
            data_dir=self.cache_dir,
        )

    @pytest.mark.parametrize(("head_size", "value_size"), [(8, 16), (40, 48), (64, 64), (128, 144)])
    def test_head_sizes(self, head_size: int, value_size: int) -> None:
        h = self.harness(head_size=head_size, value_size=value_size)
        h.check(h.step([(0, 90), (1, 3)]))
        h.check(h.step([(0, 1), (1, 1)]))

    def test_long_prompt_then_chunk_with_a_prefix(self, dtype: str) -> None:
        h = self.harness(dtype=dtype, num_heads=9, num_kv_heads=3, head_size=64)
        h.check(h.step([(0, 150), (1, 33)]))
        h.check(h.step([(1, 1), (0, 60)]))
        h.check(h.step([(0, 1), (1, 1)]))

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_keys_split_over_threads(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """One request with few heads: its keys are cut in segments and merged."""
        from cardcage.plugins.attention.cpu_paged import backend

        monkeypatch.setattr(backend, "SERIAL_WORK", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        for window in (0, 400):
            need = self.need(num_heads=3, num_kv_heads=1, sinks=True, window=window)
            h = Harness(self.build(need), need, "cpu", num_blocks=80, max_blocks=64)
            h.context(0, 777)
            sinks = torch.tensor([0.5, float("-inf"), 2.0])
            plan = h.backend.plan(h.meta([(0, 1)]))
            assert (plan.args.segments > 1) == (threads > 1)
            h.check(h.step([(0, 1)], sinks=sinks))
            h.check(h.step([(0, 2)], sinks=sinks))

    def test_result_does_not_depend_on_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without key segments a row's sums run in one order, whatever the threads."""
        from cardcage.plugins.attention.cpu_paged import backend

        results = []
        for threads in (1, 3):
            monkeypatch.setattr(backend, "SERIAL_WORK", 0)
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            h = self.harness(num_heads=8, num_kv_heads=4, seed=2)
            out, _ = h.step([(0, 30), (1, 30), (2, 30)])
            results.append(out)
        assert torch.equal(*results)

    def test_extreme_scores_stay_finite(self) -> None:
        h = self.harness(scale=8.0)
        out, lse = h.step([(0, 70)])
        h.check((out, None))
        assert torch.isfinite(out).all()
        assert lse is not None
        torch.testing.assert_close(lse.double(), h.expected()[1], rtol=1e-5, atol=1e-4)

    def test_wrong_dtype_is_refused(self) -> None:
        h = self.harness()
        plan = h.backend.plan(h.meta([(0, 2)]))
        with pytest.raises(ValueError, match="q must be float32"):
            h.backend.forward(torch.zeros(2, 4, 16, dtype=torch.float16), h.cache, plan)


class TestCompiling:
    def build(self, path: Path) -> Any:
        from cardcage.plugins.attention.cpu_paged import native

        return native.load(False, path)

    def test_the_second_load_does_not_compile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.build(tmp_path)
        monkeypatch.setattr(subprocess, "run", None)
        self.build(tmp_path)
        assert len(list(tmp_path.glob("*.so"))) == 1

    def test_a_broken_cached_library_is_made_again(self, tmp_path: Path) -> None:
        self.build(tmp_path)
        (library,) = tmp_path.glob("*.so")
        library.unlink()
        library.write_bytes(b"not a library")
        self.build(tmp_path)
        assert library.stat().st_size > 1000

    def test_without_a_compiler_it_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(PluginLoadError, match="torch_reference"):
            self.build(tmp_path)
        reasons = CpuPaged().reasons_against(AttentionNeed())
        assert len(reasons) == 1
        assert "PATH" in reasons[0]

    def test_a_compiler_that_fails_is_quoted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = tmp_path / "cc"
        fake.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        with pytest.raises(PluginLoadError, match="no such flag"):
            self.build(tmp_path)

    def test_plain_vectors_give_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compiled for the oldest processor of the kind: short vectors, no threads."""
        from cardcage.plugins.attention.cpu_paged import native
        from cardcage.plugins.attention.cpu_paged.backend import Backend

        monkeypatch.setattr(native, "ATTEMPTS", ((),))
        suite = TestCpuPaged()
        need = suite.need(head_size=40, value_size=48)
        h = Harness(Backend(need, tmp_path), need, "cpu")
        h.check(h.step([(0, 90), (1, 3)]))
        h.check(h.step([(0, 1), (1, 1)]))
