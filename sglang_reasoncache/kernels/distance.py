# SPDX-License-Identifier: Apache-2.0
"""The KV distance between two blocks, as in stage 2 of the ReasonCache paper (arXiv 2507.21433v3).

``dist = (1/N) sum_layers (||K_c - K_k||_2 + ||V_c - V_k||_2) / (2 d h)`` for blocks c and k as flat fp32
tensors, with N layers, d tokens per block and h KV heads. Elements are subtracted before they are squared,
because a distance computed from the norms of the blocks would lose its digits to cancellation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_reasoncache import native
from sglang_reasoncache.kernels.paged import BACKENDS, read_keys, read_rows
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.native.pool import NativePool

#: Key and value buffer of a layer, ``[num_slots, heads, head_dim]`` each.
Layer = tuple[Tensor, Tensor]


class DistanceKernel:
    """Sums the squared differences between the KV of two blocks, for many pairs of blocks in one call.

    The buffers must be the pool's own memory, not copies, because the kernel keeps their addresses.

    Attributes:
        backend: The implementation that runs: "native" (C++), "triton" or "torch".
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        """``layers``: keys and values of every layer, see ``PagedKv``; all layers have the same dtypes, shapes
        and strides. ``rotation``: how to rotate keys; if None, keys are compared as cached. ``backend``: None
        chooses C++ in host memory, Triton on a CUDA device, and PyTorch elsewhere or if C++ cannot be compiled.
        Raises ValueError if layers differ, NativeUnavailable if "native" is given but cannot be compiled."""
        keys = layers[0][0]
        layouts = {tuple((x.dtype, x.shape, x.stride()) for x in layer) for layer in layers}
        if len(layouts) > 1:
            raise ValueError(f"the layers of the KV pool have {len(layouts)} layouts, supported: 1")
        self._device = keys.device
        self._layers = list(layers)
        self._rotation = None if rotation is None else rotation.to(keys.device)
        self._native: NativePool | None = None
        self.backend = backend or BACKENDS.get(keys.device.type, "torch")
        if self.backend == "native":
            try:
                self._native = NativePool(self._layers, self._rotation)
            except native.NativeUnavailable:
                if backend is not None:
                    raise
                self.backend = "torch"
        elif self.backend == "triton":
            from sglang_reasoncache.kernels import distance_triton

            self._bases = distance_triton.addresses(self._layers)

    def squares(self, dst_slots: Tensor, src_slots: Tensor, shift: Tensor | None = None) -> Tensor:
        """Sums of squared differences. On a CUDA device the call only launches a kernel.

        Args:
            dst_slots: int64 ``[pairs, d]`` on the pool's device, slots of a pair's block that would be freed.
            src_slots: int64 ``[pairs, d]``, slots of the other block, which would be read in its place.
            shift: int32 ``[pairs, d]``, by how many positions to rotate each key of ``src_slots`` (where it
                would be used minus where it was cached). If None, keys are compared as cached.

        Returns:
            fp64 ``[pairs, num_layers, 2]``, one sum for keys and one for values. A sum is not finite if one of
            its elements is not. The sums of tensor-parallel ranks can be added.

        Raises:
            ValueError: wrong dtype, shape or device; ``shift`` without a rotation; with the backend "native"
                also a slot or shift out of range. With "triton" such an entry makes sums of its pair NaN.
        """
        shape = dst_slots.shape
        device = self._device
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
        dst_slots = dst_slots.contiguous()
        src_slots = src_slots.contiguous()
        if self._native is not None:
            return self._native.distance(dst_slots, src_slots, shift)
        if self.backend == "triton":
            from sglang_reasoncache.kernels import distance_triton

            return distance_triton.squares(
                self._layers, self._bases, self._rotation, dst_slots, src_slots, shift
            )
        return self._by_pytorch(dst_slots, src_slots, shift)

    def _by_pytorch(self, dst: Tensor, src: Tensor, shift: Tensor | None) -> Tensor:
        sums = []
        for keys, values in self._layers:
            k = read_rows(keys, dst) - read_keys(keys, src, shift, self._rotation)
            v = read_rows(values, dst) - read_rows(values, src)
            sums += [difference.square_().sum(dim=(1, 2, 3)) for difference in (k, v)]
        return torch.stack(sums, dim=1).unflatten(1, (-1, 2)).double()


def block_distances(squares: Tensor, block: int, num_heads: float) -> Tensor:
    """The paper's distance, fp64 ``[pairs]``, 0 for equal blocks.

    ``squares``: the results of :meth:`DistanceKernel.squares`, added up over all ranks. ``block``: d.
    ``num_heads``: h, counted over all ranks (for latent attention see ``sharing.measure.BlockMeter``).
    """
    return squares.sqrt().sum(dim=-1).mean(dim=-1) / (2 * block * num_heads)
