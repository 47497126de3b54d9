# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs against hand-computed cases and a loop."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_reasoncache.kernels.distance import block_distances, squared_differences

Layers = list[tuple[torch.Tensor, torch.Tensor]]

#: Relative tolerance of a sum of squares in fp32, the dtype differences are taken in.
FP32_SUM = 1e-5


def random_layers(num_layers: int, heads: int, dim: int, dtype: torch.dtype) -> Layers:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(64, heads, dim, generator=generator).to(dtype),
            torch.randn(64, heads, dim, generator=generator).to(dtype),
        )
        for _ in range(num_layers)
    ]


def random_slots(pairs: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shape = (pairs, block)
    return (
        torch.randint(0, 64, shape, generator=generator),
        torch.randint(0, 64, shape, generator=generator),
    )


def loop_distance(layers: Layers, dst: list[int], src: list[int], heads: int) -> float:
    """The formula of the paper, one number at a time, in double precision."""
    total = 0.0
    for keys, values in layers:
        for side in (keys.double(), values.double()):
            squares = 0.0
            for d, s in zip(dst, src, strict=True):
                for x, y in zip(
                    side[d].flatten().tolist(), side[s].flatten().tolist(), strict=True
                ):
                    squares += (x - y) ** 2
            total += math.sqrt(squares) / (2 * len(dst) * heads)
    return total / len(layers)


def test_one_layer_by_hand() -> None:
    """Keys differ by (3, 4), values by (0, 5): (5 + 5) / (2 * 1 * 1) = 5."""
    keys = torch.tensor([[[1.0, 1.0]], [[4.0, 5.0]]])
    values = torch.tensor([[[2.0, -3.0]], [[2.0, 2.0]]])
    squares = squared_differences([(keys, values)], torch.tensor([[0]]), torch.tensor([[1]]))
    assert squares.tolist() == [[[25.0, 25.0]]]
    assert block_distances(squares, block=1, num_heads=1).tolist() == [5.0]


def test_layers_tokens_and_heads_by_hand() -> None:
    """Two tokens, two heads of dim 1, two layers; every difference of the first layer is 1."""
    ones, zeros = torch.ones(2, 2, 1), torch.zeros(2, 2, 1)
    first = (torch.cat((zeros, ones)), torch.cat((ones, zeros)))
    second = (torch.cat((zeros, zeros)), torch.cat((zeros, 3 * ones)))
    squares = squared_differences([first, second], torch.tensor([[0, 1]]), torch.tensor([[2, 3]]))
    assert squares.tolist() == [[[4.0, 4.0], [0.0, 36.0]]]
    # Layer 1: (2 + 2) / 8, layer 2: (0 + 6) / 8; their mean.
    assert block_distances(squares, block=2, num_heads=2).tolist() == [0.625]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("pairs", "block", "num_layers", "heads", "dim"),
    [(1, 1, 1, 1, 2), (5, 3, 2, 1, 19), (2, 16, 3, 5, 8), (7, 8, 2, 2, 33)],
)
def test_agrees_with_a_loop(
    pairs: int, block: int, num_layers: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Stored values are taken as they are: the dtype of the pool adds no error of its own."""
    layers = random_layers(num_layers, heads, dim, dtype)
    dst, src = random_slots(pairs, block)
    found = block_distances(squared_differences(layers, dst, src), block, heads)
    assert found.dtype == torch.float64
    expected = [
        loop_distance(layers, d, s, heads) for d, s in zip(dst.tolist(), src.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=FP32_SUM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_is_at_distance_zero_of_itself(dtype: torch.dtype) -> None:
    layers = random_layers(2, 2, 8, dtype)
    slots, _ = random_slots(3, 4)
    assert block_distances(squared_differences(layers, slots, slots), 4, 2).tolist() == [0, 0, 0]


def test_near_equal_blocks_do_not_cancel() -> None:
    """Large values that differ in their last bits: the expanded square would give 0 or worse."""
    keys = torch.full((2, 1, 4), 1000.0)
    keys[1] += 2**-10
    squares = squared_differences([(keys, keys)], torch.tensor([[0]]), torch.tensor([[1]]))
    assert squares.tolist() == [[[4 * 2.0**-20, 4 * 2.0**-20]]]


def test_distance_is_symmetric() -> None:
    layers = random_layers(2, 3, 8, torch.float32)
    dst, src = random_slots(4, 5)
    there, back = squared_differences(layers, dst, src), squared_differences(layers, src, dst)
    assert torch.equal(there, back)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_sums_of_split_heads_make_the_whole(split: int) -> None:
    """Tensor-parallel ranks hold their own heads and add up their squares."""
    heads = 6
    layers = random_layers(3, heads, 7, torch.bfloat16)
    dst, src = random_slots(4, 5)
    whole = squared_differences(layers, dst, src)
    parts = [
        squared_differences([(k[:, part], v[:, part]) for k, v in layers], dst, src)
        for part in (slice(0, split), slice(split, heads))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=FP32_SUM, atol=0)
    torch.testing.assert_close(
        block_distances(parts[0] + parts[1], 5, heads),
        block_distances(whole, 5, heads),
        rtol=FP32_SUM,
        atol=0,
    )


def test_only_source_keys_are_rotated() -> None:
    layers = random_layers(1, 2, 4, torch.bfloat16)
    ((keys, values),) = layers
    dst, src = random_slots(3, 2)
    seen = []

    def turn(source: torch.Tensor) -> torch.Tensor:
        seen.append((source.dtype, tuple(source.shape)))
        return -source

    squares = squared_differences(layers, dst, src, turn)
    assert seen == [(torch.float32, (3, 2, 2, 4))]
    expected = (keys[dst].float() + keys[src].float()).square().sum((1, 2, 3))
    torch.testing.assert_close(squares[:, 0, 0], expected.double(), rtol=FP32_SUM, atol=0)
    plain = (values[dst].float() - values[src].float()).square().sum((1, 2, 3))
    torch.testing.assert_close(squares[:, 0, 1], plain.double(), rtol=FP32_SUM, atol=0)


def test_pool_may_be_a_strided_view() -> None:
    """Some pools keep K and V of a slot side by side."""
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(64, 2, 2, 8, generator=generator)
    dst, src = random_slots(3, 4)
    views = squared_differences([(both[:, 0], both[:, 1])], dst, src)
    copies = squared_differences([(both[:, 0].clone(), both[:, 1].clone())], dst, src)
    assert torch.equal(views, copies)
