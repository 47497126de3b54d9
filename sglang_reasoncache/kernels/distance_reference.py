# SPDX-License-Identifier: Apache-2.0
"""KV distance in plain PyTorch: the reference of every kernel, and their stand-in.

Gathers both blocks, rotates the source keys, subtracts in fp32. Takes memory for a few copies of
one layer's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.pool import check_shift, check_slots, read_keys, read_rows

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation


def sums(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rotation: KeyRotation | None,
    dst_slots: torch.Tensor,
    src_slots: torch.Tensor,
    shift: torch.Tensor | None,
    moments: bool,
) -> torch.Tensor:
    """See ``DistanceKernel.squares`` and, with ``moments``, ``DistanceKernel.moments``.

    Raises:
        ValueError: on the CPU, a slot or shift out of range; checking waits for other devices.
    """
    if dst_slots.device.type == "cpu":
        check_slots("dst_slots", dst_slots, len(layers[0][0]))
        check_slots("src_slots", src_slots, len(layers[0][0]))
        if shift is not None and rotation is not None:
            check_shift(shift, rotation)
    found = []
    for keys, values in layers:
        for x, y in (
            (read_rows(keys, dst_slots), read_keys(keys, src_slots, shift, rotation)),
            (read_rows(values, dst_slots), read_rows(values, src_slots)),
        ):
            terms = (x * x, y * y, x * y) if moments else ((x - y).square_(),)
            found.append(torch.stack([term.sum(dim=(1, 2, 3)) for term in terms], dim=-1))
    shape = (len(dst_slots), len(layers), 2, *[3] * moments)
    return torch.stack(found, dim=1).view(shape).double()
