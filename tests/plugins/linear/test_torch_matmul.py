"""The plain product: shapes, bias, storage that is not copied."""

from __future__ import annotations

import pytest
import torch

from cardcage.core.contracts import LinearCaps, LinearNeed, QuantTensor
from cardcage.plugins.linear.torch_matmul import TorchMatmul


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


HOST = torch.device("cpu")


def record(weight: torch.Tensor) -> QuantTensor:
    shape = (weight.shape[0], weight.shape[1])
    return QuantTensor("none", shape, {"weight": weight}, lambda r: weight, lambda r, i: weight[i])


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(tokens: int, dtype: torch.dtype, with_bias: bool) -> None:
    kernel = TorchMatmul().build(LinearNeed(), None, None)
    weight, bias = torch.randn(5, 8).to(dtype), torch.randn(5).to(dtype)
    handle = kernel.prepare(record(weight), HOST)
    x = torch.randn(tokens, 16).to(dtype)[:, ::2]  # strided input is fine
    got = kernel.run(handle, x, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_wide_product_is_not_rounded(dtype: torch.dtype) -> None:
    weight, x = torch.randn(2050, 24).to(dtype), torch.randn(3, 24).to(dtype)
    got = TorchMatmul().build(LinearNeed(), None, None).run_wide(weight, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


def test_the_weight_is_not_copied() -> None:
    kernel = TorchMatmul().build(LinearNeed(), None, None)
    weight = torch.randn(5, 8)
    assert kernel.prepare(record(weight), HOST).data_ptr() == weight.data_ptr()


def test_caps_take_plain_weights_alone() -> None:
    caps = TorchMatmul.caps
    assert isinstance(caps, LinearCaps)
    assert caps.encoding == frozenset({"none"})
