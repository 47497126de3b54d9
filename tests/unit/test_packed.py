# SPDX-License-Identifier: Apache-2.0
"""Tests matrix products with packed weights against PyTorch's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.model_loader.weight_utils import default_weight_loader

from sglang_reasoncache.cpu import packed


def weight_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape).to(dtype), requires_grad=False)


@pytest.mark.parametrize("rows", [(2,), (48,), (3, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_pytorch(rows: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = weight_of(640, 256)
    bias = torch.randn(640) if has_bias else None
    x = torch.randn(*rows, 256)
    layer = SimpleNamespace(weight=weight)
    found = packed._around_linear(lambda *_: 1 / 0, None, layer, x, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_new_weights_are_packed_anew() -> None:
    weight = weight_of(640, 256)
    x = torch.randn(4, 256)
    first = packed.product(x, weight, None)
    kept = getattr(weight, packed.PACKED)[1]
    assert packed.product(x, weight, None).equal(first)
    assert getattr(weight, packed.PACKED)[1] is kept
    weight.mul_(2)
    torch.testing.assert_close(packed.product(x, weight, None), 2 * first, rtol=1e-5, atol=1e-4)


def test_weights_that_sglang_loads_are_packed_anew() -> None:
    """Its loaders write ``weight.data``, which has a version of its own."""
    weight = weight_of(640, 256)
    x = torch.randn(4, 256)
    first = packed.product(x, weight, None)
    default_weight_loader(weight, 2 * weight)
    packed.after_load(None)
    torch.testing.assert_close(packed.product(x, weight, None), 2 * first, rtol=1e-5, atol=1e-4)


def test_what_stays_with_sglang() -> None:
    def stock(*arguments: Any, **_: Any) -> str:
        return "SGLang's"

    big = SimpleNamespace(weight=weight_of(640, 256))
    x = torch.randn(4, 256)
    for layer, rows in (
        (big, x[:1]),
        (SimpleNamespace(weight=weight_of(64, 256)), x),
        (SimpleNamespace(weight=weight_of(640, 256, dtype=torch.bfloat16)), x.bfloat16()),
    ):
        assert packed._around_linear(stock, None, layer, rows) == "SGLang's"
        assert packed._around_lm_head(stock, None, rows, layer) == "SGLang's"
    assert packed._around_lm_head(stock, None, x, big, out=torch.empty(4, 640)) == "SGLang's"
    assert (
        packed._around_lm_head(stock, None, x, SimpleNamespace(set_lora=0, **vars(big)))
        == "SGLang's"
    )
    found = packed._around_lm_head(stock, None, x, big, None)
    torch.testing.assert_close(found, x @ big.weight.T, rtol=1e-5, atol=1e-4)
