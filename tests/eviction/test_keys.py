# SPDX-License-Identifier: Apache-2.0
"""Keys as policies get them: of held positions, un-rotated on demand, scored over all heads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.eviction.held import HeldKeys, KeySource, Reads
from sglang_reasoncache.eviction.policies.by_keys import relative_norms, similarity
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.two_ranks import on_two_ranks

SLOTS, HEADS, DIM, LAYERS = 32, 4, 8, 3
#: Slot of each position of row 1; -1 was evicted, slot 9 serves two positions.
ROW = [3, 9, -1, 14, 9, -1, -1, 30, 1]
HELD = np.array([0, 1, 3, 4, 7, 8])


def buffers(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(LAYERS, SLOTS, HEADS, DIM, generator=generator)
    return [layer.to(dtype) for layer in keys]


def source(
    layers: list[torch.Tensor], *, rotation: KeyRotation | None = None, group: Any = None
) -> KeySource:
    """Over plain tensors: SGLang's pool gives its buffers by layer, from ``start_layer`` on."""
    pool = SimpleNamespace(
        start_layer=2, layer_num=len(layers), get_key_buffer=lambda layer: layers[layer - 2]
    )
    rows = torch.full((2, 12), 99, dtype=torch.int32)
    rows[1, : len(ROW)] = torch.tensor(ROW, dtype=torch.int32)
    cached_at = CachedPositions(SLOTS, "cpu")
    cached_at.positions[:] = -7
    cached_at.record(torch.tensor([3, 9, 14, 30, 1]), torch.tensor([0, 1, 3, 7, 8]))
    return KeySource(pool, rows, cached_at, rotation, num_heads=HEADS, ranks=Ranks(group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_stored_keys_are_fp32_of_the_slots(dtype: torch.dtype) -> None:
    layers = buffers(dtype)
    keys = HeldKeys(source(layers), 1, HELD)
    assert keys.layers == range(2, 2 + LAYERS)
    for layer in keys.layers:
        found = keys.stored(layer)
        assert found.dtype == torch.float32
        expected = torch.stack([layers[layer - 2][ROW[at]].float() for at in HELD.tolist()])
        assert torch.equal(found, expected)
    # Position 4 reads what was computed for position 1.
    assert keys.cached_at().tolist() == [0, 1, 3, 1, 7, 8]
    with pytest.raises(RuntimeError, match="refused at start-up"):
        keys.unrotated(2)


@pytest.mark.parametrize("is_neox", [True, False])
def test_unrotated_keys_are_those_before_rotary_embedding(is_neox: bool) -> None:
    angles = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotation = KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=1), DIM, is_neox)
    plain = buffers()
    rotated = [layer.clone() for layer in plain]
    for before, after in zip(plain, rotated, strict=True):
        for slot, cached_at in ((3, 0), (9, 1), (14, 3), (30, 7), (1, 8)):
            after[slot] = rotation.rotate(before[slot], torch.tensor(cached_at))
    keys = HeldKeys(source(rotated, rotation=rotation), 1, HELD)
    for layer in keys.layers:
        expected = plain[layer - 2][[ROW[at] for at in HELD]]
        torch.testing.assert_close(keys.unrotated(layer), expected)


def test_scores_are_averaged_over_layers_and_heads() -> None:
    layers, slots = buffers(), [ROW[at] for at in HELD]
    found = HeldKeys(source(layers), 1, HELD).token_scores(lambda keys: keys[..., 0])
    expected = torch.stack([layer[slots][..., 0] for layer in layers]).mean(dim=(0, 2))
    assert found.dtype == np.float64
    assert found == pytest.approx(expected.double().numpy())


def test_a_policy_that_is_asked_again_reads_the_row_as_it_is_then() -> None:
    """Slots that it gave up since may hold anybody's keys; an evicted position reads SGLang's padding."""
    layers, read = buffers(), Reads()
    where = source(layers)
    keys = HeldKeys(where, 1, HELD, read)
    before = keys.stored(2)
    where.rows[1, HELD[1]], where.rows[1, HELD[2]] = 20, -1
    assert torch.equal(keys.stored(2), before)
    assert read.ready()
    slots = [ROW[HELD[0]], 20, 0, *(ROW[at] for at in HELD[3:])]
    assert torch.equal(keys.stored(2), layers[0][slots].float())


def scored(heads: slice, group: Any = None) -> list[list[float]]:
    """By two policies' functions, of a process that has some of the heads."""
    own = [layer[:, heads].contiguous() for layer in buffers()]
    keys = HeldKeys(source(own, group=group), 1, HELD)
    functions = relative_norms, lambda k: similarity(k, "mean_raw")
    return [keys.token_scores(function).tolist() for function in functions]


def _half(rank: int, group: Any) -> list[list[float]]:
    """With half of the heads."""
    return scored(slice(rank * 2, rank * 2 + 2), group)


def test_ranks_agree_on_the_scores_of_all_heads(tmp_path: Path) -> None:
    """Bit for bit the same on both ranks, and what one process with all heads finds."""
    found = on_two_ranks(_half, tmp_path, 240)
    assert found[0] == found[1]
    for scores, whole in zip(found[0], scored(slice(None)), strict=True):
        assert scores == pytest.approx(whole)
