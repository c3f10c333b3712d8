"""The torch reference backend against dense float64 attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cardcage.plugins.attention.torch_reference import TorchReference
from tests.contracts.attention_suite import AttentionSuite


class TestTorchReference(AttentionSuite):
    declaration = TorchReference
    dtypes = ("float32", "float16", "bfloat16")

    @pytest.mark.parametrize("head_size", [16, 80, 96, 576])
    def test_any_head_size(self, head_size: int) -> None:
        h = self.harness(head_size=head_size)
        h.check(h.step([(0, 11)]))
        h.check(h.step([(0, 1), (1, 3)]))

    @pytest.mark.parametrize("block_size", [1, 5, 528])
    def test_any_block_size(self, block_size: int) -> None:
        h = self.harness(block_size=block_size)
        h.check(h.step([(0, 11)]))
        h.check(h.step([(0, 1), (1, 3)]))

    def test_float64_runs_in_float64(self) -> None:
        h = self.harness(dtype="float64")
        out, _ = h.step([(0, 19), (1, 1)])
        want, _ = h.expected()
        torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)

    def test_long_prompt_then_chunk_with_a_prefix(self) -> None:
        h = self.harness(num_blocks=64)
        h.check(h.step([(0, 150)], with_lse=False))
        h.check(h.step([(0, 60)], with_lse=False))
        h.check(h.step([(0, 1)], with_lse=False))


@pytest.mark.gpu
class TestTorchReferenceOnGpu(AttentionSuite):
    declaration = TorchReference
    device = "cuda"
    dtypes = ("float32", "bfloat16")

    @pytest.fixture(autouse=True)
    def _full_float32(self) -> Iterator[None]:
        # Not monkeypatch: the setting is no attribute that can be deleted again.
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        yield
        torch.backends.cuda.matmul.allow_tf32 = before
