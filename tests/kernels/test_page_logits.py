# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of the logits of pages, in PyTorch and in Triton, beside fp64."""

import pytest
import torch

from sglang_reasoncache.kernels.page_logits import page_logits
from tests.kernels.engines import ON_DEVICE
from tests.triton_runs import INTERPRETED, there

ENGINES = ["native", ON_DEVICE] if not INTERPRETED else ["triton"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 12), (33, 1, 8), (2, 2, 80)])
def test_logits_are_the_largest_that_a_key_can_have(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, engine: str
) -> None:
    """Queries have the dtype of the bounds, or another one. Pages that are none get -inf."""
    torch.manual_seed(3)
    keys = torch.randn(30, 5, kv_heads, dim).to(dtype)
    bounds = torch.cat((keys.amax(1), keys.amin(1)), dim=2)
    pages = torch.randint(-3, 34, (3, 19))
    pages[1] = -1
    for query_dtype in {dtype, torch.float32}:
        query = torch.randn(3, heads, dim).to(query_dtype)
        placed = there if engine == "triton" else torch.Tensor.contiguous
        found = page_logits(placed(query), placed(bounds), placed(pages), 0.4, backend=engine)
        found = found.cpu().double()
        of_heads = keys[pages.clamp(0, 29)].double().repeat_interleave(heads // kv_heads, dim=3)
        products = torch.maximum(
            query.double()[:, None] * of_heads.amax(2), query.double()[:, None] * of_heads.amin(2)
        )
        expected = products.sum(-1).transpose(1, 2) * 0.4
        is_page = (pages >= 0) & (pages < 30)
        expected = expected.masked_fill(~is_page[:, None], float("-inf"))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        # No key's own logit is larger.
        own = torch.einsum("rhd,rpshd->rhps", query.double(), of_heads) * 0.4
        largest = own.amax(-1).masked_fill(~is_page[:, None], float("-inf"))
        assert (found >= largest - 1e-3).all()
