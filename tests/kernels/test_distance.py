# SPDX-License-Identifier: Apache-2.0
"""KV distance by every backend, against blocks gathered first and summed in fp64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances, cosine_distances
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.native.pool import DTYPES
from tests.kernels.distance_cases import (
    CASES,
    SUM,
    Case,
    Layers,
    assert_sums,
    expected_moments,
    make_entries,
    make_layers,
    rotation_of,
    spoil,
    tolerance,
)
from tests.kernels.engines import backend as backend
from tests.kernels.engines import host_backend as host_backend
from tests.kernels.engines import unavailable
from tests.kernels.pools import TABLE
from tests.triton_runs import DEVICE, INTERPRETED, run_interpreted, starts_interpreter, there

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


class Sums:
    """Squares and moments on the host, computed where the backend computes."""

    def __init__(self, layers: Layers, rotation: KeyRotation | None, backend: str) -> None:
        self._device = DEVICE if backend == "triton" else "cpu"
        if backend == "triton":
            layers = [(there(keys), there(values)) for keys, values in layers]
        self.kernel = DistanceKernel(layers, rotation, backend=backend)
        assert self.kernel.backend == backend

    def squares(self, *entries: torch.Tensor | None) -> torch.Tensor:
        return self.kernel.squares(*self._placed(entries)).cpu()

    def moments(self, *entries: torch.Tensor | None) -> torch.Tensor:
        return self.kernel.moments(*self._placed(entries)).cpu()

    def _placed(self, entries: tuple[torch.Tensor | None, ...]) -> Any:
        return (None if side is None else side.to(self._device) for side in entries)


def cases() -> list[Case]:
    """Smaller and fewer for the interpreter, which takes 0.1 s a program."""
    if not INTERPRETED:
        return CASES
    small = [
        dataclasses.replace(case, pairs=min(case.pairs, 1), layers=1)
        for case in CASES
        if case.heads * case.k_dim <= 288 and case.block < 19
    ]
    return [*dict.fromkeys(small), Case(pairs=3, layers=2, block=3)]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_agrees_with_gathered_blocks(backend: str, case: Case) -> None:
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    sums = Sums(layers, rotation, backend)
    for by in {id(s): s for s in (None, shift)}.values():
        squares, moments = sums.squares(dst, src, by), sums.moments(dst, src, by)
        assert squares.shape == (case.pairs, case.layers, 2)
        assert moments.shape == (case.pairs, case.layers, 2, 3)
        expected = expected_moments(layers, rotation, dst, src, by)
        assert_sums(squares, moments, expected, tolerance(by))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_what_is_not_finite_shows(backend: str, dtype: torch.dtype, is_neox: bool) -> None:
    case = Case(
        pairs=48, block=2, dtype=dtype, is_neox=is_neox, heads=3, k_dim=20, rotary_dim=12, v_dim=20
    )
    layers, rotation = make_layers(case), rotation_of(case)
    spoiled = spoil(layers)
    dst = torch.arange(48)[:, None].expand(-1, 2).contiguous()
    src, shift = dst.flip(0), make_entries(case)[2]
    assert shift is not None
    if INTERPRETED:
        dst = torch.tensor([[3, 0], [4, 1], [0, 1], [9, 9], [5, 6]])
        src, shift = torch.tensor([[1, 0], [0, 0], [7, 6], [8, 1], [2, 2]]), shift[:5]
    sums = Sums(layers, rotation, backend)
    broken = torch.zeros(len(dst), 2, 2, dtype=torch.bool)
    for layer, side, slot in spoiled:
        broken[:, layer, side] |= ((dst == slot) | (src == slot)).any(-1)
    for by in (None, shift):
        assert torch.equal(~sums.squares(dst, src, by).isfinite(), broken)
        if not INTERPRETED:
            moments = sums.moments(dst, src, by)
            assert torch.equal((~moments.isfinite()).any(-1), broken)


def test_no_shift_is_as_cached(backend: str) -> None:
    """Bit for bit but by Triton, whose tiles differ."""
    case = Case(heads=3, k_dim=96, rotary_dim=96, v_dim=96)
    layers, rotation = make_layers(case), rotation_of(case)
    layers[0][0][5, 0, 0] = float("inf")
    dst, src, shift = make_entries(case)
    assert shift is not None
    src[0, 0] = 5
    sums = Sums(layers, rotation, backend)
    still, cached = sums.squares(dst, src, torch.zeros_like(shift)), sums.squares(dst, src)
    torch.testing.assert_close(still, cached, rtol=1e-6 if backend == "triton" else 0, atol=0)
    assert torch.equal(still[..., 1], sums.squares(dst, src, shift)[..., 1])


def test_slots_may_be_views(backend: str) -> None:
    case = Case()
    dst, src, shift = make_entries(case)
    assert shift is not None
    sums = Sums(make_layers(case), rotation_of(case), backend)
    wide, shifts = torch.stack((dst, src), dim=-1), torch.stack((shift, shift), dim=-1)
    assert torch.equal(
        sums.squares(wide[..., 0], wide[..., 1], shifts[..., 0]), sums.squares(dst, src, shift)
    )


_BAD_SLOTS = [-1, 48, 1 << 40, -(1 << 63)]
_BAD_SHIFTS = [TABLE, -TABLE, (1 << 31) - 1, -(1 << 31)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, slot) for name in ("dst_slots", "src_slots") for slot in _BAD_SLOTS),
        *(("shift", shift) for shift in _BAD_SHIFTS),
    ],
)
def test_values_out_of_range(backend: str, name: str, value: int) -> None:
    """Refused; where the host reads no values before a launch, their pair alone is NaN."""
    case = Case(pairs=3)
    sums = Sums(make_layers(case), rotation_of(case), backend)
    entries = dict(zip(("dst_slots", "src_slots", "shift"), make_entries(case), strict=True))
    good = sums.squares(*entries.values())
    bad = entries[name]
    assert bad is not None
    bad[1, 3] = value
    if backend != "triton":
        for call in (sums.squares, sums.moments):
            with pytest.raises(ValueError, match=f"{name} has .*(outside the pool|rotary table)"):
                call(*entries.values())
        return
    found = sums.squares(*entries.values())
    assert found[1, :, 0].isnan().all()
    assert name == "shift" or found[1, :, 1].isnan().all()
    found[1] = good[1]
    assert torch.equal(found, good)


# -- by hand, and by a loop ------------------------------------------------------


def random_layers(num_layers: int, heads: int, dim: int, dtype: torch.dtype) -> Layers:
    return make_layers(
        Case(layers=num_layers, heads=heads, k_dim=dim, v_dim=dim, dtype=dtype), slots=64
    )


def random_slots(pairs: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make_entries(Case(pairs=pairs, block=block), slots=64)[:2]


def squares_of(layers: Layers, dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return DistanceKernel(layers, backend="torch").squares(dst, src)


def loop_distance(layers: Layers, dst: list[int], src: list[int], heads: int) -> float:
    """The formula of the paper, one number at a time, in double precision."""
    total = 0.0
    for keys, values in layers:
        for side in (keys.float(), values.float()):
            squares = 0.0
            for d, s in zip(dst, src, strict=True):
                for x, y in zip(
                    side[d].flatten().tolist(), side[s].flatten().tolist(), strict=True
                ):
                    squares += (x - y) ** 2
            total += math.sqrt(squares) / (2 * len(dst) * heads)
    return total / len(layers)


_ONES, _ZEROS = torch.ones(2, 2, 1), torch.zeros(2, 2, 1)


@pytest.mark.parametrize(
    ("layers", "squares", "distance"),
    [
        # Keys differ by (3, 4), values by (0, 5): (5 + 5) / (2 * 1 * 1).
        (
            [([[[1.0, 1.0]], [[4.0, 5.0]]], [[[2.0, -3.0]], [[2.0, 2.0]]])],
            [[25.0, 25.0]],
            5.0,
        ),
        # Two tokens, two heads, two layers: (2 + 2) / 8 and (0 + 6) / 8; their mean.
        (
            [
                (torch.cat((_ZEROS, _ONES)), torch.cat((_ONES, _ZEROS))),
                (torch.cat((_ZEROS, _ZEROS)), torch.cat((_ZEROS, 3 * _ONES))),
            ],
            [[4.0, 4.0], [0.0, 36.0]],
            0.625,
        ),
        # Large values that differ in their last bits: the expanded square would give 0 or worse.
        (
            [([[[1000.0] * 4], [[1000.0 + 2**-10] * 4]],) * 2],
            [[4 * 2.0**-20] * 2],
            2 * 2.0**-9 / 2,
        ),
    ],
)
def test_by_hand(host_backend: str, layers: Any, squares: Any, distance: float) -> None:
    pool = [(torch.as_tensor(keys), torch.as_tensor(values)) for keys, values in layers]
    tokens, heads = len(pool[0][0]) // 2, pool[0][0].shape[1]
    dst, src = torch.arange(2 * tokens).view(2, 1, tokens)
    found = DistanceKernel(pool, backend=host_backend).squares(dst, src)
    assert found.tolist() == [squares]
    assert block_distances(found, tokens, heads).tolist() == [distance]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("pairs", "block", "num_layers", "heads", "dim"),
    [(1, 1, 1, 1, 2), (5, 3, 2, 1, 19), (2, 16, 3, 5, 8), (7, 8, 2, 2, 33)],
)
def test_agrees_with_a_loop(
    pairs: int, block: int, num_layers: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Stored values are taken as they are: the dtype of the pool adds no error of its own. A
    block is at distance 0 of itself, and there is as far as back."""
    layers = random_layers(num_layers, heads, dim, dtype)
    dst, src = random_slots(pairs, block)
    squares = squares_of(layers, dst, src)
    found = block_distances(squares, block, heads)
    assert found.dtype == torch.float64
    expected = [
        loop_distance(layers, d, s, heads) for d, s in zip(dst.tolist(), src.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(squares, squares_of(layers, src, dst))
    assert not squares_of(layers, dst, dst).any()


@pytest.mark.parametrize("split", [1, 2, 5])
def test_sums_of_split_heads_make_the_whole(host_backend: str, split: int) -> None:
    """Tensor-parallel ranks hold their own heads and add up their squares."""
    layers = random_layers(3, 6, 7, torch.bfloat16)
    dst, src = random_slots(4, 5)
    whole, *parts = (
        DistanceKernel([(k[:, a:b], v[:, a:b]) for k, v in layers], backend=host_backend).squares(
            dst, src
        )
        for a, b in ((0, 6), (0, split), (split, 6))
    )
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=0)


def moments_of(*blocks: tuple[list[float], list[float]]) -> torch.Tensor:
    """``[1, len(blocks) / 2, 2, 3]`` of pairs of vectors: K and V of each layer in turn."""
    sums = []
    for x, y in blocks:
        a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
        sums.append(torch.stack((a @ a, b @ b, a @ b)))
    return torch.stack(sums).view(1, -1, 2, 3)


SAME, OPPOSITE = ([1.0, 2.0], [3.0, 6.0]), ([1.0, 0.0], [-5.0, 0.0])
ORTHOGONAL, NOTHING = ([1.0, 0.0], [0.0, 2.0]), ([0.0, 0.0], [0.0, 0.0])
HALF_NOTHING = ([0.0, 0.0], [3.0, 4.0])
HUGE, TINY = ([1e150, 0.0], [1e150, 0.0]), ([1e-150, 0.0], [1e-150, 0.0])


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((SAME, OPPOSITE, ORTHOGONAL, NOTHING), (0 + 2 + 1 + 0) / 4),
        ((NOTHING, NOTHING), 0.0),
        ((HALF_NOTHING, NOTHING), 0.5),
        # The product of the squared norms alone would overflow or vanish in fp64.
        ((HUGE, TINY), 0.0),
    ],
)
def test_cosine_by_hand(blocks: Any, expected: float) -> None:
    assert cosine_distances(moments_of(*blocks)).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cosine_hides_nothing(value: float) -> None:
    spoiled = ([value, 1.0], [1.0, 0.0])
    assert cosine_distances(moments_of(spoiled, ([1.0], [1.0]))).isnan().all()
    assert cosine_distances(moments_of(([0.0], [0.0]), ([0.0], [value]))).isnan().all()


def quarter_turns(dim: int = 4, is_neox: bool = True) -> KeyRotation:
    """Every angle is the position times 90 degrees."""
    angles = torch.arange(9)[:, None] * torch.full((dim // 2,), math.pi / 2)
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, is_neox)


@pytest.mark.parametrize("is_neox", [True, False])
def test_source_key_is_rotated_by_its_shift(host_backend: str, is_neox: bool) -> None:
    """A quarter turn takes (1, 0) to (0, 1), its opposite to (0, -1), two to (-1, 0). Values and
    destinations stay."""
    own, partner = (0, 2) if is_neox else (0, 1)
    keys = torch.zeros(2, 1, 4)
    keys[1, 0, own] = 1.0
    keys[0, 0, partner] = 1.0
    kernel = DistanceKernel([(keys, keys)], quarter_turns(is_neox=is_neox), backend=host_backend)
    shift = torch.tensor([[0], [1], [-1], [2], [-3]], dtype=torch.int32)
    dst, src = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1, dtype=torch.int64)
    squares = kernel.squares(dst, src, shift)
    assert squares[:, 0, 0].tolist() == pytest.approx([2, 0, 4, 2, 0], abs=1e-5)
    assert squares[:, 0, 1].tolist() == [2.0] * 5
    assert kernel.squares(dst, src)[:, 0, 0].tolist() == [2.0] * 5


# -- refusals, and which backend ---------------------------------------------------

_LONG, _INT = torch.zeros(3, 2).long(), torch.zeros(3, 2).int()


@pytest.mark.parametrize(
    ("dst", "src", "shift", "words"),
    [
        (torch.zeros(3, 2), _LONG, None, "dst_slots must be torch.int64"),
        (torch.zeros(3).long(), torch.zeros(3).long(), None, r"must be \[pairs, d\]"),
        (torch.zeros(3, 0).long(), torch.zeros(3, 0).long(), None, "d >= 1"),
        (_LONG, _INT, None, "src_slots must be"),
        (_LONG, _LONG[:2], None, r"got torch.int64 \[2, 2\]"),
        (_LONG, _LONG, _LONG, "shift must be torch.int32"),
        (_LONG, _LONG, _INT[:, :1], r"shift must be torch.int32 \[3, 2\]"),
    ],
)
def test_entries_that_are_refused(
    host_backend: str, dst: torch.Tensor, src: torch.Tensor, shift: torch.Tensor, words: str
) -> None:
    layers = random_layers(2, 2, 8, torch.bfloat16)
    kernel = DistanceKernel(layers, quarter_turns(8), backend=host_backend)
    for call in (kernel.squares, kernel.moments):
        with pytest.raises(ValueError, match=words):
            call(dst, src, shift)
    as_cached = DistanceKernel(layers, backend=host_backend)
    with pytest.raises(ValueError, match="without a rotation"):
        as_cached.squares(_LONG, _LONG, _INT)


def test_pools_that_are_refused(host_backend: str) -> None:
    good = torch.zeros(4, 2, 8)
    turned = good.transpose(0, 1).contiguous().transpose(0, 1)
    for layers, words in (
        ([], "at least one layer"),
        ([(good.long(), good.long())], "pool dtype torch.int64"),
        ([(good[0], good[0])], r"must be \[num_slots, heads, head_dim\]"),
        ([(good, good[:3])], "alike in the first two"),
        ([(good, good.half())], "V torch.float16"),
        ([(good, good), (good, good[:, :, :4])], "V of layer 1"),
        ([(good, good), (turned, good)], "K of layer 1"),
    ):
        with pytest.raises(ValueError, match=words):
            DistanceKernel(layers, backend=host_backend)
    with pytest.raises(ValueError, match="rotary_dim 16 does not fit head_dim 8"):
        DistanceKernel([(good, good)], quarter_turns(16), backend=host_backend)
    with pytest.raises(ValueError, match="native, triton, torch"):
        DistanceKernel([(good, good)], backend="cuda")


def test_pool_with_scattered_elements_is_left_to_pytorch() -> None:
    ((keys, _),) = random_layers(1, 8, 2, torch.float32)
    keys = keys.transpose(1, 2)
    dst, src = random_slots(3, 4)
    kernel = DistanceKernel([(keys, keys)])
    assert kernel.backend == "torch"
    expected = squares_of([(keys.contiguous(), keys.contiguous())], dst, src)
    torch.testing.assert_close(kernel.squares(dst, src), expected, rtol=SUM, atol=0)
    with pytest.raises(ValueError, match="side by side"):
        DistanceKernel([(keys, keys)], backend="native")


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_which_backend_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ in host memory; without the library PyTorch."""
    layers = random_layers(1, 1, 2, torch.float8_e4m3fn)
    try:
        native.library()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    assert DistanceKernel(layers).backend == "native"
    monkeypatch.setattr(native, "library", unavailable)
    assert DistanceKernel(layers).backend == "torch"
    with pytest.raises(native.NativeUnavailable):
        DistanceKernel(layers, backend="native")
