# SPDX-License-Identifier: Apache-2.0
"""Compares the KV distances of every backend (how much K and V of two blocks differ) with fp64 sums by PyTorch.
Under Triton's interpreter, these tests run in one process with ``test_attention.py``."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances
from sglang_reasoncache.native.pool import DTYPES
from tests.kernels.attention_cases import LATENT, LAYOUTS, TABLE, lay_out, make_rotation
from tests.kernels.engines import HOST, by_engine, unavailable
from tests.kernels.engines import backend as backend
from tests.kernels.engines import host_of_distances as host_of_distances
from tests.kernels.engines import of_distances as of_distances
from tests.triton_runs import INTERPRETED, there

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Layers = list[tuple[torch.Tensor, torch.Tensor]]
Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


#: Relative tolerances of fp32 sums over up to 3 * 8 * 256 squares. ``TURNED_SUM`` is larger, because it also
#: allows for the rounding of source keys that are rotated in fp32.
SUM = 3e-6
TURNED_SUM = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes a KV pool and one call of the distance kernel."""

    pairs: int = 2
    block: int = 8
    layers: int = 2
    heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    rotary_dim: int = 16  # 0: no rotation
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    layout: str = "halves"


CASES = [
    *(Case(pairs=pairs, block=block) for pairs in (0, 1, 5) for block in (1, 8, 16, 19)),
    *(
        Case(heads=heads, k_dim=dim, v_dim=dim, rotary_dim=dim, is_neox=neox, block=3)
        for heads, dim, neox in itertools.product((1, 3, 8), (6, 64, 96, 128, 256), (True, False))
    ),
    *(Case(dtype=dtype, is_neox=neox, k_dim=70, rotary_dim=70, v_dim=33, heads=3)
      for dtype, neox in itertools.product(DTYPES, (True, False))),
    *(Case(dtype=dtype, k_dim=128, rotary_dim=128, v_dim=128, block=16) for dtype in DTYPES),
    *(Case(layout=layout, is_neox=neox, heads=3, k_dim=24, v_dim=24, rotary_dim=rotary)
      for layout, neox, rotary in itertools.product(LAYOUTS, (True, False), (0, 8, 24))),
    Case(k_dim=128, rotary_dim=32, v_dim=128),
    Case(k_dim=96, rotary_dim=94, v_dim=16),
    Case(layout=LATENT, is_neox=False, heads=1, k_dim=64, rotary_dim=64, v_dim=512),
    Case(k_dim=1, rotary_dim=0, v_dim=1, heads=1, layers=1),
]  # fmt: skip


def make_layers(case: Case, slots: int = 48, seed: int = 7) -> Layers:
    """Random buffers ``[slots, heads, dim]`` in the case's layout."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    sizes = slots, case.heads, case.k_dim, case.v_dim
    return [lay_out(case.layout, made, *sizes) for _ in range(case.layers)]


def make_entries(case: Case, slots: int = 48, seed: int = 11) -> Entries:
    """Random slots for both blocks of each pair, and shifts: positive, negative, 0 and very large ones."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.pairs, case.block)
    dst = torch.randint(0, slots, shape, generator=generator)
    src = torch.randint(0, slots, shape, generator=generator)
    if not case.rotary_dim:
        return dst, src, None
    near = torch.randint(-40, 40, shape, generator=generator)
    far = torch.randint(1 - TABLE, TABLE, shape, generator=generator)
    shift = torch.where(torch.rand(shape, generator=generator) < 0.5, near, far)
    if shift.numel():
        shift[0, 0] = 0
        shift[-1, -1] = 1 - TABLE
    return dst, src, shift.to(torch.int32)


class Sums:
    """A case's kernel and pool on the backend's device. ``squares`` copies the kernel's sums to the host."""

    def __init__(self, case: Case, backend: str, layers: Layers | None = None) -> None:
        self.case = case
        self.layers = make_layers(case) if layers is None else layers
        self.rotation = make_rotation(case.rotary_dim, case.is_neox)
        self._placed = there if backend == "triton" else lambda tensor: tensor
        placed = [(self._placed(keys), self._placed(values)) for keys, values in self.layers]
        self.kernel = DistanceKernel(placed, self.rotation, backend=backend)
        assert self.kernel.backend == backend

    def squares(self, *entries: torch.Tensor | None) -> torch.Tensor:
        placed: Any = (None if side is None else self._placed(side) for side in entries)
        return self.kernel.squares(*placed).cpu()

    def expected(self, dst: torch.Tensor, src: torch.Tensor, shift: Any) -> torch.Tensor:
        """Sums of (x - y)^2 over K and over V of the gathered blocks x and y: fp64 ``[pairs, layers, 2]``."""
        result = torch.zeros(dst.shape[0], len(self.layers), 2, dtype=torch.float64)
        for index, sides in enumerate(self.layers):
            for side, buffer in enumerate(sides):
                values = buffer.float()
                x = values[dst]
                y = values[src]
                if side == 0 and self.rotation is not None and shift is not None:
                    turned = self.rotation.rotate(y, shift)
                    y = torch.where((shift != 0)[..., None, None], turned, y)
                result[:, index, side] = (x.double() - y.double()).square().sum((1, 2, 3))
        return result


#: Fewer, smaller cases for builds for older CPUs and for Triton's interpreter, which takes 0.1 s per program.
FEW = [
    *{
        dataclasses.replace(case, pairs=min(case.pairs, 1), layers=1): None
        for case in CASES
        if case.heads * case.k_dim <= 288 and case.block < 19
    },
    Case(pairs=3, layers=2, block=3),
]


@pytest.mark.parametrize(
    ("of_distances", "case"), by_engine(CASES, FEW, HOST), ids=str, indirect=["of_distances"]
)
def test_agrees_with_gathered_blocks(of_distances: str, case: Case) -> None:
    dst, src, shift = make_entries(case)
    sums = Sums(case, of_distances)
    for by in {id(s): s for s in (None, shift)}.values():
        expected = sums.expected(dst, src, by)
        rel = SUM if by is None else TURNED_SUM
        torch.testing.assert_close(sums.squares(dst, src, by), expected, rtol=rel, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_what_is_not_finite_shows(of_distances: str, dtype: torch.dtype, is_neox: bool) -> None:
    """A NaN or infinity makes its sum not finite, even if it is the first or last element of a slot."""
    sizes: dict[str, Any] = dict(heads=3, k_dim=20, rotary_dim=12, v_dim=20)
    case = Case(pairs=48, block=2, dtype=dtype, is_neox=is_neox, **sizes)
    layers = make_layers(case)
    infinite = math.inf if dtype != torch.float8_e4m3fn else math.nan
    places = ((0, 0, 3), (0, 0, 4), (0, 1, 5), (1, 0, 6), (1, 1, 7), (1, 1, 3))
    for number, (layer, side, slot) in enumerate(places):
        row = layers[layer][side][slot].float()
        row[(0, 0) if number % 2 else (2, 19)] = (math.nan, infinite, -infinite)[number % 3]
        layers[layer][side][slot] = row.to(dtype)
    dst = torch.arange(48)[:, None].expand(-1, 2).contiguous()
    src = dst.flip(0)
    shift = make_entries(case)[2]
    assert shift is not None
    if INTERPRETED:
        dst = torch.tensor([[3, 0], [4, 1], [0, 1], [9, 9], [5, 6]])
        src = torch.tensor([[1, 0], [0, 0], [7, 6], [8, 1], [2, 2]])
        shift = shift[:5]
    sums = Sums(case, of_distances, layers)
    broken = torch.zeros(len(dst), 2, 2, dtype=torch.bool)
    for layer, side, slot in places:
        broken[:, layer, side] |= ((dst == slot) | (src == slot)).any(-1)
    for by in (None, shift):
        assert torch.equal(~sums.squares(dst, src, by).isfinite(), broken)


def test_no_shift_is_as_cached(of_distances: str) -> None:
    """Zero shifts give the same bits as no shifts, except with Triton, where the results differ by rounding."""
    case = Case(heads=3, k_dim=96, rotary_dim=96, v_dim=96)
    layers = make_layers(case)
    layers[0][0][5, 0, 0] = float("inf")
    dst, src, shift = make_entries(case)
    assert shift is not None
    src[0, 0] = 5
    sums = Sums(case, of_distances, layers)
    still = sums.squares(dst, src, torch.zeros_like(shift))
    cached = sums.squares(dst, src)
    torch.testing.assert_close(still, cached, rtol=1e-6 if of_distances == "triton" else 0, atol=0)
    moved = sums.squares(dst, src, shift)
    assert torch.equal(still[..., 1], moved[..., 1])
    # Slots and shifts may be views that are not contiguous.
    views = (torch.stack((side, side), dim=-1)[..., 0] for side in (dst, src, shift))
    torch.testing.assert_close(sums.squares(*views), moved, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("dst_slots", "src_slots"), (-1, 48, 1 << 40, -(1 << 63))),
        *(("shift", shift) for shift in (TABLE, -TABLE, (1 << 31) - 1, -(1 << 31))),
    ],
)
def test_values_out_of_range(backend: str, name: str, value: int) -> None:
    """The C++ kernel refuses values out of range. The Triton kernel returns NaN for the sums that use them."""
    case = Case(pairs=3)
    sums = Sums(case, backend)
    entries = dict(zip(("dst_slots", "src_slots", "shift"), make_entries(case), strict=True))
    good = sums.squares(*entries.values())
    bad = entries[name]
    assert bad is not None
    bad[1, 3] = value
    if backend != "triton":
        with pytest.raises(ValueError, match=f"{name} has .*(outside the pool|rotary table)"):
            sums.squares(*entries.values())
        return
    found = sums.squares(*entries.values())
    assert found[1, :, 0].isnan().all()
    assert name == "shift" or found[1, :, 1].isnan().all()
    found[1] = good[1]
    assert torch.equal(found, good)


#: Buffers of two tokens, two heads and one dim, filled with 0, 1 or 3.
_ZEROS, _ONES, _THREES = ([[[value], [value]]] * 2 for value in (0.0, 1.0, 3.0))


@pytest.mark.parametrize(
    ("layers", "squares", "distance"),
    [
        # Keys differ by (3, 4), values by (0, 5), so the distance is (5 + 5) / (2 * 1 * 1).
        ([([[[1.0, 1.0]], [[4.0, 5.0]]], [[[2.0, -3.0]], [[2.0, 2.0]]])], [[25.0, 25.0]], 5.0),
        # Two tokens, two heads, two layers: the distance is the mean of (2 + 2) / 8 and (0 + 6) / 8.
        (
            [(_ZEROS + _ONES, _ONES + _ZEROS), (_ZEROS * 2, _ZEROS + _THREES)],
            [[4, 4], [0, 36]],
            0.625,
        ),
        # Large values that differ only in their last bits: x^2 - 2xy + y^2 in fp32 would be 0 or less.
        ([([[[1000.0] * 4], [[1000.0 + 2**-10] * 4]],) * 2], [[4 * 2.0**-20] * 2], 2 * 2.0**-9 / 2),
    ],
)
def test_by_hand(host_of_distances: str, layers: Any, squares: Any, distance: float) -> None:
    pool = [(torch.as_tensor(keys), torch.as_tensor(values)) for keys, values in layers]
    tokens = len(pool[0][0]) // 2
    heads = pool[0][0].shape[1]
    dst, src = torch.arange(2 * tokens).view(2, 1, tokens)
    found = DistanceKernel(pool, backend=host_of_distances).squares(dst, src)
    assert found.tolist() == [squares]
    assert block_distances(found, tokens, heads).tolist() == [distance]


_LONG = torch.zeros(3, 2).long()
_INT = torch.zeros(3, 2).int()


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
def test_refused_entries(
    host_of_distances: str, dst: Any, src: Any, shift: Any, words: str
) -> None:
    layers = make_layers(Case(k_dim=8, v_dim=8))
    kernel = DistanceKernel(layers, make_rotation(8, True), backend=host_of_distances)
    with pytest.raises(ValueError, match=words):
        kernel.squares(dst, src, shift)
    as_cached = DistanceKernel(layers, backend=host_of_distances)
    with pytest.raises(ValueError, match="without a rotation"):
        as_cached.squares(_LONG, _LONG, _INT)


def test_layers_of_two_layouts_are_refused(host_of_distances: str) -> None:
    good = torch.zeros(4, 2, 8)
    turned = good.transpose(0, 1).contiguous().transpose(0, 1)
    for other in ((good, good[:, :, :4]), (turned, good), (good.half(), good.half())):
        with pytest.raises(ValueError, match="2 layouts"):
            DistanceKernel([(good, good), other], backend=host_of_distances)


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_which_backend_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a pool in host memory, the C++ backend is chosen, or PyTorch if the C++ library is missing."""
    layers = make_layers(Case(heads=1, k_dim=2, v_dim=2, dtype=torch.float8_e4m3fn))
    try:
        native.library()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    assert DistanceKernel(layers).backend == "native"
    monkeypatch.setattr(native, "library", unavailable)
    assert DistanceKernel(layers).backend == "torch"
    with pytest.raises(native.NativeUnavailable):
        DistanceKernel(layers, backend="native")
