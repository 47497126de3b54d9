# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs (ReasonCache, stage 2).

``dist = (1/N) sum_layers (||K_c - K_k||_2 + ||V_c - V_k||_2) / (2 d h)`` over
flattened fp32 tensors, N layers, d tokens a block, h KV heads. Differences are
taken before squaring: the form with cached norms cancels for near-equal blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

#: Rotates fp32 source keys ``[pairs, d, heads, head_dim]`` to where they would be used.
RotateKeys = Callable[[torch.Tensor], torch.Tensor]


def squared_differences(
    layers: Iterable[tuple[torch.Tensor, torch.Tensor]],
    dst_slots: torch.Tensor,
    src_slots: torch.Tensor,
    rotate: RotateKeys | None = None,
) -> torch.Tensor:
    """Sums of squared differences per pair, layer and side.

    Args:
        layers: Key and value buffer of every layer, ``[num_slots, heads, head_dim]``
            of any floating dtype.
        dst_slots: int64 ``[pairs, d]``, slots of the newer blocks.
        src_slots: int64 ``[pairs, d]``, slots they would be replaced by.
        rotate: Applied to the source keys; None compares them as cached.

    Returns:
        fp64 ``[pairs, num_layers, 2]`` (key side, value side). Additive over
        tensor-parallel ranks, each of which holds its own heads.
    """
    sums = []
    for keys, values in layers:
        source = keys[src_slots].float()
        if rotate is not None:
            source = rotate(source)
        key_sum = (keys[dst_slots].float() - source).square_().sum(dim=(1, 2, 3))
        value_sum = (
            (values[dst_slots].float() - values[src_slots].float()).square_().sum(dim=(1, 2, 3))
        )
        sums.append(torch.stack((key_sum, value_sum), dim=-1))
    return torch.stack(sums, dim=1).double()


def block_distances(squares: torch.Tensor, block: int, num_heads: int) -> torch.Tensor:
    """The paper's distance from :func:`squared_differences`.

    Args:
        squares: ``[pairs, num_layers, 2]``, summed over all ranks.
        block: Tokens per block (d).
        num_heads: KV heads over all ranks (h).

    Returns:
        fp64 ``[pairs]``, 0 for equal blocks.
    """
    return squares.sqrt().sum(dim=-1).mean(dim=-1) / (2 * block * num_heads)
