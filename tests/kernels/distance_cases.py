# SPDX-License-Identifier: Apache-2.0
"""Pools, slots and expected sums for the tests of every distance backend."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.native.pool import DTYPES
from tests.kernels.pools import LAYOUTS, TABLE, lay_out, make_rotation

Layers = list[tuple[torch.Tensor, torch.Tensor]]


#: Relative tolerance of sums in fp32 over up to 19 * 8 * 256 products; stored values are
#: read exactly, so it does not depend on their dtype.
SUM = 3e-6
#: The same when source keys were rotated in fp32.
TURNED_SUM = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One pool and one call."""

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

    def __str__(self) -> str:
        rotated = f"{'neox' if self.is_neox else 'gptj'}{self.rotary_dim}"
        return (
            f"{self.pairs}x{self.block}-{self.layers}L-{self.heads}h-{self.k_dim}-{self.v_dim}-"
            f"{rotated if self.rotary_dim else 'plain'}-{str(self.dtype)[6:]}-{self.layout}"
        )


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
    Case(k_dim=1, rotary_dim=0, v_dim=1, heads=1, layers=1),
]  # fmt: skip


def make_layers(case: Case, slots: int = 48, seed: int = 7) -> Layers:
    """Random buffers ``[slots, heads, dim]`` in the case's layout."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    sizes = slots, case.heads, case.k_dim, case.v_dim
    return [lay_out(case.layout, made, *sizes) for _ in range(case.layers)]


def make_entries(
    case: Case, slots: int = 48, seed: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Slots with repeats within and between pairs; shifts of both signs, some 0, some huge."""
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


def rotation_of(case: Case) -> KeyRotation | None:
    return make_rotation(case.rotary_dim, case.is_neox)


def expected_moments(
    layers: Layers,
    rotation: KeyRotation | None,
    dst: torch.Tensor,
    src: torch.Tensor,
    shift: torch.Tensor | None,
) -> torch.Tensor:
    """fp64 ``[pairs, layers, 2, 4]``: |x|^2, |y|^2, x.y, |x - y|^2 of blocks gathered first."""
    result = torch.zeros(dst.shape[0], len(layers), 2, 4, dtype=torch.float64)
    for index, sides in enumerate(layers):
        for side, buffer in enumerate(sides):
            values = buffer.float()
            x, y = values[dst], values[src]
            if side == 0 and rotation is not None and shift is not None:
                y = torch.where((shift != 0)[..., None, None], rotation.rotate(y, shift), y)
            x, y = x.double().flatten(1), y.double().flatten(1)
            for k, product in enumerate((x * x, y * y, x * y, (x - y) ** 2)):
                result[:, index, side, k] = product.sum(-1)
    return result


def tolerance(shift: torch.Tensor | None) -> float:
    return SUM if shift is None else TURNED_SUM


def assert_sums(
    squares: torch.Tensor, moments: torch.Tensor, expected: torch.Tensor, rel: float
) -> None:
    """Squares relative to themselves, dot products to the norms they come from."""
    assert squares.dtype == moments.dtype == torch.float64
    torch.testing.assert_close(squares.cpu(), expected[..., 3], rtol=rel, atol=0)
    moments = moments.cpu()
    torch.testing.assert_close(moments[..., :2], expected[..., :2], rtol=rel, atol=0)
    scale = (expected[..., 0] * expected[..., 1]).sqrt()
    assert ((moments[..., 2] - expected[..., 2]).abs() <= rel * scale).all()


def spoil(layers: Layers) -> list[tuple[int, int, int]]:
    """Put NaN and infinities into some slots; (layer, side, slot) of each."""
    has_infinity = layers[0][0].dtype != torch.float8_e4m3fn
    values = (float("nan"), float("inf"), -float("inf")) if has_infinity else (float("nan"),) * 3
    spoiled = []
    for number, (layer, side, slot) in enumerate(
        ((0, 0, 3), (0, 0, 4), (0, 1, 5), (1, 0, 6), (1, 1, 7), (1, 1, 3))
    ):
        buffer = layers[layer][side]
        heads, dim = buffer.shape[1:]
        # First and last elements, where tiles begin and end.
        at = (0, 0) if number % 2 else (heads - 1, dim - 1)
        row = buffer[slot].float()
        row[at] = values[number % 3]
        buffer[slot] = row.to(buffer.dtype)
        spoiled.append((layer, side, slot))
    return spoiled
