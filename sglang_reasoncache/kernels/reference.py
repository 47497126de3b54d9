# SPDX-License-Identifier: Apache-2.0
"""KV distance in plain PyTorch: the reference of every kernel, and its stand-in.

Gathers both blocks, turns the source keys, subtracts in fp32. Runs anywhere
PyTorch does and takes memory for a few copies of one layer's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.pool import read_rows

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Key and value buffer of a layer, ``[num_slots, heads, head_dim]`` each.
Layer = tuple[torch.Tensor, torch.Tensor]
#: Rotates fp32 source keys ``[pairs, d, heads, head_dim]`` to where they would be used.
RotateKeys = Callable[[torch.Tensor], torch.Tensor]


def squared_differences(
    layers: Iterable[Layer],
    dst_slots: torch.Tensor,
    src_slots: torch.Tensor,
    rotate: RotateKeys | None = None,
) -> torch.Tensor:
    """Sums of squared differences per pair, layer and side.

    Args:
        layers: Key and value buffer of every layer, of any floating dtype.
        dst_slots: int64 ``[pairs, d]``, slots of the newer blocks.
        src_slots: int64 ``[pairs, d]``, slots they would be replaced by.
        rotate: Applied to the source keys; None compares them as cached.

    Returns:
        fp64 ``[pairs, num_layers, 2]`` (key side, value side). Additive over
        tensor-parallel ranks, each of which holds its own heads.
    """
    sums = [
        torch.stack([(x - y).square_().sum(dim=(1, 2, 3)) for x, y in sides], dim=-1)
        for sides in _gathered(layers, dst_slots, src_slots, rotate)
    ]
    return torch.stack(sums, dim=1).double()


def block_moments(
    layers: Iterable[Layer],
    dst_slots: torch.Tensor,
    src_slots: torch.Tensor,
    rotate: RotateKeys | None = None,
) -> torch.Tensor:
    """Squared norms and dot product per pair, layer and side.

    Args:
        layers, dst_slots, src_slots, rotate: See :func:`squared_differences`.

    Returns:
        fp64 ``[pairs, num_layers, 2, 3]``: ``|x|^2``, ``|y|^2``, ``x.y`` of the
        destination x and the (rotated) source y. Additive over ranks.
    """
    sums = [
        torch.stack(
            [
                torch.stack([(a * b).sum(dim=(1, 2, 3)) for a, b in ((x, x), (y, y), (x, y))], -1)
                for x, y in sides
            ],
            dim=1,
        )
        for sides in _gathered(layers, dst_slots, src_slots, rotate)
    ]
    return torch.stack(sums, dim=1).double()


class ReferenceDistance:
    """The sums of :class:`~sglang_reasoncache.kernels.distance.DistanceKernel` by PyTorch.

    Args:
        layers: See :func:`squared_differences`.
        rotation: The model's rotation, None to compare as cached only.
    """

    def __init__(self, layers: Sequence[Layer], rotation: KeyRotation | None) -> None:
        self._layers = layers
        self._rotation = rotation

    def squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """See :func:`squared_differences`; ``shift`` int32 ``[pairs, d]`` or None.

        Raises:
            ValueError: on the CPU, a slot or shift out of range.
        """
        self._check(dst_slots, src_slots, shift)
        return squared_differences(self._layers, dst_slots, src_slots, self._rotate(shift))

    def moments(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """See :func:`block_moments`; ``shift`` int32 ``[pairs, d]`` or None.

        Raises:
            ValueError: on the CPU, a slot or shift out of range.
        """
        self._check(dst_slots, src_slots, shift)
        return block_moments(self._layers, dst_slots, src_slots, self._rotate(shift))

    def _rotate(self, shift: torch.Tensor | None) -> RotateKeys | None:
        if shift is None or self._rotation is None:
            return None
        rotation = self._rotation
        angles = rotation.angles(shift.to(rotation.cos.device))
        angles = type(angles)(*(table.to(shift.device) for table in angles))
        shifted = (shift != 0)[..., None, None]
        # Untouched entries stay as they are even if they are not finite: inf * 0 is NaN.
        return lambda keys: torch.where(shifted, rotation.rotate(keys, angles), keys)

    def _check(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> None:
        if dst_slots.device.type != "cpu" or not dst_slots.numel():
            return  # elsewhere a look at the values would wait for the device
        num_slots = self._layers[0][0].shape[0]
        for name, slots in (("dst_slots", dst_slots), ("src_slots", src_slots)):
            if slots.min() < 0 or slots.max() >= num_slots:
                raise ValueError(f"{name} has a slot outside the pool of {num_slots} slots")
        if shift is not None and self._rotation is not None:
            rows = self._rotation.cos.shape[0]
            if shift.long().abs().max() >= rows:
                raise ValueError(f"shift has an entry beyond the rotary table of {rows} positions")


def _gathered(
    layers: Iterable[Layer],
    dst_slots: torch.Tensor,
    src_slots: torch.Tensor,
    rotate: RotateKeys | None,
) -> Iterator[Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Per layer the fp32 blocks (destination, source) of the key side, then of the value side."""

    def sides(keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        source = read_rows(keys, src_slots)
        yield read_rows(keys, dst_slots), source if rotate is None else rotate(source)
        yield read_rows(values, dst_slots), read_rows(values, src_slots)

    for keys, values in layers:
        yield sides(keys, values)  # type: ignore[misc]
