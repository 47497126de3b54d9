# SPDX-License-Identifier: Apache-2.0
"""Bounds of pages: on a GPU if there is one, or interpreted beside ``test_attention_triton.py``."""

import random

import pytest
import torch

from tests.triton_runs import INTERPRETED, on_device, there
from tests.triton_runs import small_launches as small_launches

pytest.importorskip("triton")

from sglang_reasoncache.kernels import select_triton
from sglang_reasoncache.selection import page_bounds

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PAGE, HEADS, DIM = 4, 2, 6


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=on_device)])
def test_bounds_are_those_of_the_keys_written(
    dtype: torch.dtype, slots_dtype: torch.dtype, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token or a page and more at once; a page that is filled anew starts anew."""
    if INTERPRETED:
        monkeypatch.setattr(select_triton, "KEYS", 2)
    world, pages = random.Random(4), 12
    keys = (torch.randn(pages * PAGE, 2 * HEADS, DIM) * 3).to(dtype)
    keys = (keys if on_host else there(keys))[:, ::2]
    bounds = page_bounds.PageBounds(keys, PAGE)
    filled = [0] * pages
    for _ in range(12 if INTERPRETED else 100):
        slots: list[int] = []
        decodes = world.random() < 0.5
        for page in world.sample(range(pages), 2):
            if filled[page] == PAGE or world.random() < 0.1:
                filled[page] = 0
            count = 1 if decodes else world.randint(1, PAGE - filled[page])
            slots += range(page * PAGE + filled[page], page * PAGE + filled[page] + count)
            filled[page] += count
        keys[slots] = (torch.randn(len(slots), HEADS, DIM) * 3).to(dtype).to(keys.device)
        if on_host:
            bounds.update(torch.tensor(slots, dtype=slots_dtype))
        else:  # as SGLang pads a batch
            padded = there(torch.tensor([*slots, 0, 0], dtype=slots_dtype))
            select_triton.note_bounds(keys, padded, bounds.ends, PAGE)
            filled[0] = max(filled[0], 1)
    for page, count in enumerate(filled):
        # The padding wrote to the first slot of page 0 alone.
        count = min(count, 1) if page == 0 and not on_host else count
        if count:
            held = keys[page * PAGE : page * PAGE + count].float()
            assert torch.equal(bounds.high[page].float(), held.amax(dim=0))
            assert torch.equal(bounds.low[page].float(), held.amin(dim=0))


@on_device
def test_slots_out_of_range_are_left_out() -> None:
    keys, ends = there(torch.ones(2 * PAGE, 1, DIM)), there(torch.zeros(2, 1, 2 * DIM))
    select_triton.note_bounds(keys, there(torch.tensor([-1, -5, 2 * PAGE, 99])), ends, PAGE)
    select_triton.note_bounds(keys, there(torch.tensor([], dtype=torch.int64)), ends, PAGE)
    assert not ends.any()
