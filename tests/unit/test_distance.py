# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs against hand-computed cases and a loop."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.distance import (
    DistanceKernel,
    block_distances,
    cosine_distances,
    squared_differences,
    squares_from_moments,
)
from sglang_reasoncache.kernels.rotation import KeyRotation

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


def moments_of(*blocks: tuple[list[float], list[float]]) -> torch.Tensor:
    """``[1, len(blocks) / 2, 2, 3]`` of pairs of vectors: K and V of each layer in turn."""
    sums = []
    for x, y in blocks:
        a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
        sums.append(torch.stack((a @ a, b @ b, a @ b)))
    return torch.stack(sums).view(1, -1, 2, 3)


def test_cosine_by_hand() -> None:
    """Parallel, opposite, orthogonal, both zero: 0, 2, 1, 0; one zero and one not: 1."""
    same, opposite = ([1.0, 2.0], [3.0, 6.0]), ([1.0, 0.0], [-5.0, 0.0])
    orthogonal, nothing = ([1.0, 0.0], [0.0, 2.0]), ([0.0, 0.0], [0.0, 0.0])
    half_nothing = ([0.0, 0.0], [3.0, 4.0])
    found = cosine_distances(moments_of(same, opposite, orthogonal, nothing))
    assert found.tolist() == pytest.approx([(0 + 2 + 1 + 0) / 4])
    assert cosine_distances(moments_of(nothing, nothing)).tolist() == [0.0]
    assert cosine_distances(moments_of(half_nothing, nothing)).tolist() == [0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cosine_hides_nothing(value: float) -> None:
    spoiled = ([value, 1.0], [1.0, 0.0])
    assert cosine_distances(moments_of(spoiled, ([1.0], [1.0]))).isnan().all()
    assert cosine_distances(moments_of(([0.0], [0.0]), ([0.0], [value]))).isnan().all()


def test_cosine_of_huge_and_tiny_norms() -> None:
    """The product of the squared norms alone would overflow or vanish in fp64."""
    huge, tiny = ([1e150, 0.0], [1e150, 0.0]), ([1e-150, 0.0], [1e-150, 0.0])
    assert cosine_distances(moments_of(huge, tiny)).tolist() == pytest.approx([0.0])


def test_moments_give_squares() -> None:
    layers = random_layers(3, 2, 8, torch.bfloat16)
    dst, src = random_slots(4, 5)
    kernel = DistanceKernel(layers, backend="torch")
    squares, moments = kernel.squares(dst, src), kernel.moments(dst, src)
    torch.testing.assert_close(squares_from_moments(moments), squares, rtol=1e-5, atol=0)


def test_cached_norms_cancel() -> None:
    """Why the difference is taken first: a millionth apart, the other form sees noise."""
    keys = torch.full((2, 1, 64), 1000.0)
    keys[1, 0, 0] += 2**-10
    kernel = DistanceKernel([(keys, keys)], backend="torch")
    dst, src = torch.tensor([[0]]), torch.tensor([[1]])
    assert kernel.squares(dst, src)[0, 0, 0] == 2.0**-20
    found = squares_from_moments(kernel.moments(dst, src))[0, 0, 0]
    assert abs(found - 2.0**-20) >= 2.0**-20


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_reference_kernel_agrees_with_a_loop(heads: int, dtype: torch.dtype) -> None:
    layers = random_layers(2, heads, 6, dtype)
    dst, src = random_slots(3, 4)
    kernel = DistanceKernel(layers, backend="torch")
    assert kernel.backend == "torch"
    found = block_distances(kernel.squares(dst, src), 4, heads)
    expected = [
        loop_distance([(keys.float(), values.float()) for keys, values in layers], d, s, heads)
        for d, s in zip(dst.tolist(), src.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=FP32_SUM)


def test_no_pairs() -> None:
    kernel = DistanceKernel(random_layers(3, 2, 8, torch.float32), backend="torch")
    none = torch.empty(0, 4, dtype=torch.int64)
    assert kernel.squares(none, none).shape == (0, 3, 2)
    assert kernel.moments(none, none).shape == (0, 3, 2, 3)
    assert block_distances(kernel.squares(none, none), 4, 2).shape == (0,)


def quarter_turns(dim: int = 4, is_neox: bool = True) -> KeyRotation:
    """Every angle is the position times 90 degrees."""
    angles = torch.arange(9)[:, None] * torch.full((dim // 2,), math.pi / 2)
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, is_neox)


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("is_neox", [True, False])
def test_source_key_is_rotated_by_its_shift(backend: str | None, is_neox: bool) -> None:
    """A quarter turn takes (1, 0) to (0, 1), its opposite to (0, -1), two to (-1, 0)."""
    own, partner = (0, 2) if is_neox else (0, 1)
    keys = torch.zeros(2, 1, 4)
    keys[1, 0, own] = 1.0
    keys[0, 0, partner] = 1.0
    kernel = DistanceKernel([(keys, keys)], quarter_turns(is_neox=is_neox), backend=backend)
    shift = torch.tensor([[0], [1], [-1], [2], [-3]], dtype=torch.int32)
    dst, src = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1, dtype=torch.int64)
    squares = kernel.squares(dst, src, shift)
    assert squares[:, 0, 0].tolist() == pytest.approx([2, 0, 4, 2, 0], abs=1e-5)
    assert squares[:, 0, 1].tolist() == [2.0] * 5
    assert kernel.squares(dst, src)[:, 0, 0].tolist() == [2.0] * 5


@pytest.mark.parametrize("backend", ["torch", None])
class TestRefusals:
    """Nothing is read before the arguments have been looked at."""

    def kernel(self, backend: str | None) -> DistanceKernel:
        return DistanceKernel(
            random_layers(2, 2, 8, torch.bfloat16), quarter_turns(8), backend=backend
        )

    @pytest.mark.parametrize(
        ("dst", "src", "shift", "words"),
        [
            (torch.zeros(3, 2), torch.zeros(3, 2).long(), None, "dst_slots must be torch.int64"),
            (torch.zeros(3).long(), torch.zeros(3).long(), None, r"must be \[pairs, d\]"),
            (torch.zeros(3, 0).long(), torch.zeros(3, 0).long(), None, "d >= 1"),
            (torch.zeros(3, 2).long(), torch.zeros(3, 2).int(), None, "src_slots must be"),
            (torch.zeros(3, 2).long(), torch.zeros(2, 2).long(), None, r"got torch.int64 \[2, 2\]"),
            (
                torch.zeros(3, 2).long(),
                torch.zeros(3, 2).long(),
                torch.zeros(3, 2).long(),
                "shift must be torch.int32",
            ),
            (
                torch.zeros(3, 2).long(),
                torch.zeros(3, 2).long(),
                torch.zeros(3, 1).int(),
                r"shift must be torch.int32 \[3, 2\]",
            ),
            (torch.full((1, 1), 64), torch.zeros(1, 1).long(), None, "dst_slots has a slot"),
            (torch.zeros(1, 1).long(), torch.full((1, 1), -1), None, "src_slots has a slot"),
            (
                torch.zeros(1, 1).long(),
                torch.zeros(1, 1).long(),
                torch.full((1, 1), -9).int(),
                "rotary table of 9 positions",
            ),
            (
                torch.zeros(1, 1).long(),
                torch.zeros(1, 1).long(),
                torch.full((1, 1), -(2**31)).int(),
                "rotary table of 9 positions",
            ),
        ],
    )
    def test_entries(
        self,
        backend: str | None,
        dst: torch.Tensor,
        src: torch.Tensor,
        shift: torch.Tensor | None,
        words: str,
    ) -> None:
        kernel = self.kernel(backend)
        for call in (kernel.squares, kernel.moments):
            with pytest.raises(ValueError, match=words):
                call(dst, src, shift)

    def test_shift_without_rotation(self, backend: str | None) -> None:
        kernel = DistanceKernel(random_layers(1, 2, 8, torch.bfloat16), backend=backend)
        slots = torch.zeros(1, 1).long()
        with pytest.raises(ValueError, match="without a rotation"):
            kernel.squares(slots, slots, torch.zeros(1, 1).int())

    def test_buffers(self, backend: str | None) -> None:
        good = torch.zeros(4, 2, 8)
        for layers, words in (
            ([], "at least one layer"),
            ([(good.long(), good.long())], "pool dtype torch.int64"),
            ([(good[0], good[0])], r"must be \[num_slots, heads, head_dim\]"),
            ([(good, good[:3])], "alike in the first two"),
            ([(good, good.half())], "V of layer 0"),
            ([(good, good), (good, good[:, :, :4])], "V of layer 1"),
            ([(good, good), (good.transpose(0, 1).contiguous().transpose(0, 1), good)], "K of"),
        ):
            with pytest.raises(ValueError, match=words):
                DistanceKernel(layers, backend=backend)

    def test_rotation_wider_than_the_keys(self, backend: str | None) -> None:
        with pytest.raises(ValueError, match="rotary_dim 16 does not fit head_dim 8"):
            DistanceKernel(
                random_layers(1, 2, 8, torch.bfloat16), quarter_turns(16), backend=backend
            )


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="native, triton, torch"):
        DistanceKernel(random_layers(1, 1, 2, torch.float32), backend="cuda")


def test_pool_with_scattered_elements_is_left_to_pytorch() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(64, 2, 8, generator=generator).transpose(1, 2)
    dst, src = random_slots(3, 4)
    kernel = DistanceKernel([(keys, keys)])
    assert kernel.backend == "torch"
    expected = squared_differences([(keys.contiguous(), keys.contiguous())], dst, src)
    torch.testing.assert_close(kernel.squares(dst, src), expected, rtol=FP32_SUM, atol=0)
    with pytest.raises(ValueError, match="side by side"):
        DistanceKernel([(keys, keys)], backend="native")


def test_without_the_library_pytorch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise native.NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "library", unavailable)
    layers = random_layers(1, 1, 2, torch.float32)
    assert DistanceKernel(layers).backend == "torch"
    with pytest.raises(native.NativeUnavailable):
        DistanceKernel(layers, backend="native")
