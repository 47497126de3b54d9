# SPDX-License-Identifier: Apache-2.0
"""Layouts of a layer, a rotary table for the kernels' tests, and dense attention in fp64."""

from collections.abc import Callable

import torch

from sglang_reasoncache.kernels.rotation import KeyRotation

#: How a pool may lay out a layer: halves of one allocation (SGLang), K and V of a slot side by side,
#: heads in front of slots, heads with room between them, an odd address.
LAYOUTS = ("halves", "slot", "head-major", "gaps", "odd")
#: Layout of MLA: values and keys are parts of one row.
LATENT = "latent"
#: Positions in the rotary table.
TABLE = 40_000


def make_rotation(rotary_dim: int, is_neox: bool) -> KeyRotation | None:
    """Plain rotation of the first ``rotary_dim`` dims, base 10,000; None for 0 of them."""
    if not rotary_dim:
        return None
    powers = torch.arange(0, rotary_dim, 2).double() / rotary_dim
    angles = torch.arange(TABLE).double()[:, None] * 10_000.0**-powers
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    return KeyRotation(table, rotary_dim, is_neox)


def lay_out(
    layout: str, made: Callable[..., torch.Tensor], slots: int, heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[slots, heads, dim]``: strided views of tensors that ``made(*shape)`` returns."""
    match layout:
        case "halves" if k_dim == v_dim:
            keys, values = made(2, slots, heads, k_dim)
        case "halves":
            keys, values = made(slots, heads, k_dim), made(slots, heads, v_dim)
        case "latent":
            values, keys = made(slots, heads, v_dim + k_dim).split((v_dim, k_dim), dim=2)
        case "slot":
            keys, values = made(slots, 2, heads, k_dim).unbind(1)
        case "head-major":
            keys, values = made(2, heads, slots, k_dim).transpose(1, 2)
        case "gaps":
            both = made(2, slots, heads, k_dim + 5)
            keys, values = both[0, :, :, :k_dim], both[1, :, :, 3 : k_dim + 3]
        case "odd":
            flat = made(2, slots * heads * k_dim + 1)[:, 1:]
            keys, values = (side.view(slots, heads, k_dim) for side in flat)
        case _:
            raise AssertionError(layout)
    return keys, values


def turned(keys: torch.Tensor, turn: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """fp64 ``[tokens, heads, dim]``, pairs of dims multiplied by complex ``[tokens, pairs]``."""
    half, turn = turn.shape[1], turn[:, None]
    x, rest = keys[..., : 2 * half], keys[..., 2 * half :]
    if is_neox:
        pairs = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((pairs.real, pairs.imag, rest), dim=-1)
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn
    return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), dim=-1)


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *,
    hidden: torch.Tensor | None = None, cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """fp64 attention of ``[tokens, heads, dim]`` to ``[held, kv_heads, dim]``, and its weights ``[heads,
    tokens, held]``. ``hidden`` ``[tokens, held]``: pairs that are masked."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (side.double().repeat_interleave(group, dim=1) for side in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if cap:
        logits = cap * (logits / cap).tanh()
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    powers = logits.exp()
    total = powers.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
    weights = powers / total[..., None]
    return torch.einsum("hqk,khd->qhd", weights, values), weights
