# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs (ReasonCache, arXiv 2507.21433v3, stage 2).

``dist = (1/N) sum_layers (||K_c - K_k||_2 + ||V_c - V_k||_2) / (2 d h)`` over
flattened fp32 tensors, N layers, d tokens a block, h KV heads. Differences are
taken before squaring: the form with cached norms cancels for near-equal blocks
(:func:`squares_from_moments`) and reads as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_reasoncache.kernels.pool import check_rotation, check_sides, threads_of_a_call
from sglang_reasoncache.kernels.reference import Layer, ReferenceDistance, squared_differences

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

__all__ = [
    "BACKENDS",
    "DistanceKernel",
    "block_distances",
    "cosine_distances",
    "squared_differences",
    "squares_from_moments",
]

#: C++ for host memory, Triton for CUDA devices, PyTorch for what neither takes.
BACKENDS = ("native", "triton", "torch")


class _Backend(Protocol):
    def squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor: ...

    def moments(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor: ...


class DistanceKernel:
    """Sums over pairs of blocks, one pass over the pool for all pairs of a call.

    Made once for a pool; it keeps the buffers' addresses, so they must be the
    pool's own memory and not copies made for reading.

    Args:
        layers: Key and value buffer of every layer, ``[num_slots, heads, head_dim]``
            each, fp32, bf16, fp16, fp8 e4m3fn or e5m2, all of one dtype and
            device. Keys are shaped and strided alike in all layers, so are values;
            their head dims may differ.
        rotation: The model's rotation of keys, None to compare as cached only.
        backend: One of :data:`BACKENDS`; None takes the first that is available
            for these buffers.
        threads: Upper bound on CPU threads of a call; None takes what PyTorch uses.

    Raises:
        ValueError: buffers of unlike or unsupported layout, a rotation that does
            not fit the keys, an unknown backend, or one that cannot read them.
        sglang_reasoncache.native.NativeUnavailable: ``backend`` is "native" and
            the C++ library cannot be had.
    """

    #: Which of :data:`BACKENDS` serves.
    backend: str

    def __init__(
        self,
        layers: Sequence[Layer],
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
        threads: int | None = None,
    ) -> None:
        layers = [(keys, values) for keys, values in layers]
        _check_layers(layers)
        check_rotation(rotation, layers[0][0].shape[2])
        threads = threads_of_a_call(threads)
        self._device = layers[0][0].device
        self._rotates = rotation is not None
        self.backend, self._impl = _choose(layers, rotation, backend, threads)

    def squares(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums of squared differences.

        On a CUDA device the call only launches, and its result stays there.

        Args:
            dst_slots: int64 ``[pairs, d]`` on the pool's device, slots of the newer blocks.
            src_slots: int64 ``[pairs, d]``, slots they would be replaced by.
            shift: int32 ``[pairs, d]``, positions by which to rotate each source key
                (where it would be used minus where it was computed), 0 leaves it as
                it is. None compares keys as cached.

        Returns:
            fp64 ``[pairs, num_layers, 2]`` (key side, value side), not finite if what
            was read is not. Additive over tensor-parallel ranks.

        Raises:
            ValueError: wrong dtype, shape or device; ``shift`` without a rotation; a
                slot outside the pool or a shift outside the rotary table. On CUDA
                values are not looked at: such a pair comes out as NaN.
        """
        self._check(dst_slots, src_slots, shift)
        return self._impl.squares(dst_slots, src_slots, shift)

    def moments(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Squared norms and dot products, for :func:`cosine_distances`.

        Args:
            dst_slots, src_slots, shift: See :meth:`squares`.

        Returns:
            fp64 ``[pairs, num_layers, 2, 3]``: ``|x|^2``, ``|y|^2`` and ``x.y`` of the
            destination x and the rotated source y. Additive over ranks.

        Raises:
            ValueError: See :meth:`squares`.
        """
        self._check(dst_slots, src_slots, shift)
        return self._impl.moments(dst_slots, src_slots, shift)

    def _check(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> None:
        shape = dst_slots.shape
        if len(shape) != 2 or not shape[1]:
            raise ValueError(f"dst_slots must be [pairs, d] with d >= 1, got {list(shape)}")
        _check_entries("dst_slots", dst_slots, torch.int64, shape, self._device)
        _check_entries("src_slots", src_slots, torch.int64, shape, self._device)
        if shift is not None:
            _check_entries("shift", shift, torch.int32, shape, self._device)
            if not self._rotates:
                raise ValueError("shift given, but the kernel was made without a rotation")


def block_distances(squares: torch.Tensor, block: int, num_heads: int) -> torch.Tensor:
    """The paper's distance from :meth:`DistanceKernel.squares`.

    Args:
        squares: ``[pairs, num_layers, 2]``, summed over all ranks.
        block: Tokens per block (d).
        num_heads: KV heads over all ranks (h).

    Returns:
        fp64 ``[pairs]``, 0 for equal blocks.
    """
    return squares.sqrt().sum(dim=-1).mean(dim=-1) / (2 * block * num_heads)


def cosine_distances(moments: torch.Tensor) -> torch.Tensor:
    """Angle instead of difference (an ablation of the paper): mean of ``1 - cos``.

    Args:
        moments: ``[pairs, num_layers, 2, 3]`` of :meth:`DistanceKernel.moments`,
            summed over all ranks.

    Returns:
        ``[pairs]``, mean over layers and both sides; a side on which both blocks
        are zero counts as equal, one on which one of them is as orthogonal.
    """
    xx, yy, xy = moments.unbind(-1)
    norms = xx.sqrt() * yy.sqrt()
    # Where one norm is 0 the product is too, and so is x.y; NaN is not 0 and stays.
    cosine = xy / torch.where(norms == 0, 1.0, norms)
    cosine = torch.where((xx == 0) & (yy == 0), 1.0, cosine)
    return (1 - cosine).mean(dim=(1, 2))


def squares_from_moments(moments: torch.Tensor) -> torch.Tensor:
    """Squared differences by ``|x|^2 + |y|^2 - 2 x.y``, the paper's form with cached norms.

    Not what is used: the dot product reads both blocks as the difference does,
    and for near-equal blocks the fp32 sums cancel.

    Args:
        moments: ``[..., 3]`` of :meth:`DistanceKernel.moments`.

    Returns:
        ``[...]``, never below 0.
    """
    xx, yy, xy = moments.unbind(-1)
    return (xx + yy - 2 * xy).clamp(min=0)


def _choose(
    layers: Sequence[Layer], rotation: KeyRotation | None, backend: str | None, threads: int
) -> tuple[str, _Backend]:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    keys, values = layers[0]
    side_by_side = keys.stride(2) == values.stride(2) == 1
    if backend == "torch" or (backend is None and not side_by_side):
        return "torch", ReferenceDistance(layers, rotation)
    if not side_by_side:
        raise ValueError(f"{backend}: elements of a head must lie side by side in the pool")
    if backend == "native" and keys.device.type != "cpu":
        raise ValueError(f"native: the pool is on {keys.device}")
    if backend == "native" or (backend is None and keys.device.type == "cpu"):
        # Imported here: a kernel on another device needs neither library nor compiler.
        from sglang_reasoncache import native
        from sglang_reasoncache.native.distance import NativeDistance

        try:
            return "native", NativeDistance(native.library(), layers, rotation, threads)
        except native.NativeUnavailable:
            if backend == "native":
                raise
            return "torch", ReferenceDistance(layers, rotation)
    if backend == "triton" or keys.device.type == "cuda":
        try:
            from sglang_reasoncache.kernels.distance_triton import TritonDistance
        except ImportError as error:
            if backend == "triton":
                raise ValueError(f"triton: {error}") from error
        else:
            return "triton", TritonDistance(layers, rotation)
    return "torch", ReferenceDistance(layers, rotation)


def _check_layers(layers: Sequence[Layer]) -> None:
    from sglang_reasoncache.native.distance import DTYPES

    if not layers:
        raise ValueError("a pool of at least one layer is needed")
    keys, values = layers[0]
    if keys.dtype not in DTYPES:
        raise ValueError(f"pool dtype {keys.dtype}, supported: {', '.join(map(str, DTYPES))}")
    check_sides(keys, values)
    for side, first in enumerate((keys, values)):
        for index, layer in enumerate(layers):
            buffer = layer[side]
            found = (buffer.dtype, buffer.device, tuple(buffer.shape), buffer.stride())
            wanted = (keys.dtype, keys.device, tuple(first.shape), first.stride())
            if found != wanted:
                raise ValueError(f"{'KV'[side]} of layer {index} is {found}, not {wanted}")


def _check_entries(
    name: str, found: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    if found.dtype != dtype or found.shape != shape or found.device != device:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on {device}, "
            f"got {found.dtype} {list(found.shape)} on {found.device}"
        )
