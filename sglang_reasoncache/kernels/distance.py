# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs (ReasonCache, arXiv 2507.21433v3, stage 2).

``dist = (1/N) sum_layers (||K_c - K_k||_2 + ||V_c - V_k||_2) / (2 d h)`` over flattened fp32
tensors, N layers, d tokens a block, h KV heads. Differences first: cached norms would cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_reasoncache.kernels import reference
from sglang_reasoncache.kernels.paged import check_pool, choose_backend
from sglang_reasoncache.native.pool import DTYPES, NativePool

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Key and value buffer of a layer, ``[num_slots, heads, head_dim]`` each.
Layer = tuple[Tensor, Tensor]


class DistanceKernel:
    """Sums over pairs of blocks, one pass over the pool for all pairs of a call.

    It keeps the buffers' addresses: they must be the pool's own memory. ``backend`` is the one
    of ``paged.BACKENDS`` that computes.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        """``layers``: keys and values of every layer, of a dtype of ``DTYPES``; keys shaped and
        strided alike in all layers, so values; their head dims may differ. ``rotation``: of keys, None
        to compare as cached only. Raises ValueError and NativeUnavailable for unlike layers, and as
        ``check_pool`` and ``choose_backend``."""
        if not layers:
            raise ValueError("a pool of at least one layer is needed")
        layers = list(layers)
        keys, values = layers[0]
        self._rotation = rotation = check_pool(keys, values, rotation)
        if keys.dtype not in DTYPES:
            supported = ", ".join(map(str, DTYPES))
            raise ValueError(f"pool dtype {keys.dtype}, supported: {supported}")
        layouts = [[(x.dtype, x.device, tuple(x.shape), x.stride()) for x in kv] for kv in layers]
        for index, layout in enumerate(layouts):
            for side, found, wanted in zip("KV", layout, layouts[0], strict=True):
                if found != wanted:
                    raise ValueError(f"{side} of layer {index} is {found}, not {wanted}")
        self._device = keys.device
        self.backend = choose_backend(backend, keys, values)
        self._squares: Callable[..., Tensor]
        if self.backend == "torch":
            self._squares = functools.partial(reference.distance, layers, rotation)
        elif self.backend == "triton":
            from sglang_reasoncache.kernels.distance_triton import TritonDistance

            self._squares = TritonDistance(layers, rotation).squares
        else:
            self._squares = NativePool(layers, rotation).distance

    def squares(self, dst_slots: Tensor, src_slots: Tensor, shift: Tensor | None = None) -> Tensor:
        """Sums of squared differences; on a CUDA device the call only launches.

        Args:
            dst_slots: int64 ``[pairs, d]`` on the pool's device, slots of the newer blocks.
            src_slots: int64 ``[pairs, d]``, slots they would be replaced by.
            shift: int32 ``[pairs, d]``, positions by which to rotate each source key (where it
                would be used minus where it was cached). None compares keys as cached.

        Returns:
            fp64 ``[pairs, num_layers, 2]`` (key side, value side), not finite if what was read is
            not. Additive over tensor-parallel ranks.

        Raises:
            ValueError: wrong dtype, shape or device; ``shift`` without a rotation; a slot or shift
                out of range (on CUDA values are not checked: such a pair is NaN).
        """
        shape, device = dst_slots.shape, self._device
        if len(shape) != 2 or not shape[1]:
            raise ValueError(f"dst_slots must be [pairs, d] with d >= 1, got {list(shape)}")
        for name, side, dtype in (
            ("dst_slots", dst_slots, torch.int64),
            ("src_slots", src_slots, torch.int64),
            ("shift", shift, torch.int32),
        ):
            if side is not None and (side.dtype, side.shape, side.device) != (dtype, shape, device):
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)} on {device}, "
                    f"got {side.dtype} {list(side.shape)} on {side.device}"
                )
        if shift is not None:
            if self._rotation is None:
                raise ValueError("shift given, but the kernel was made without a rotation")
            shift = shift.contiguous()
        return self._squares(dst_slots.contiguous(), src_slots.contiguous(), shift)


def block_distances(squares: Tensor, block: int, num_heads: int) -> Tensor:
    """The paper's distance, fp64 ``[pairs]``, 0 for equal blocks.

    ``squares`` of :meth:`DistanceKernel.squares` and ``num_heads`` (h) are those of all ranks;
    ``block`` is d.
    """
    return squares.sqrt().sum(dim=-1).mean(dim=-1) / (2 * block * num_heads)
