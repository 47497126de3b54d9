# SPDX-License-Identifier: Apache-2.0
"""The rotary table of the kernels' tests."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels.rotation import KeyRotation

#: Positions in the table.
TABLE = 40_000


def make_rotation(rotary_dim: int, is_neox: bool) -> KeyRotation | None:
    """Plain rotation of the first ``rotary_dim`` dims, base 10,000; None for 0 of them."""
    if not rotary_dim:
        return None
    powers = torch.arange(0, rotary_dim, 2).double() / rotary_dim
    angles = torch.arange(TABLE).double()[:, None] * 10_000.0**-powers
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    return KeyRotation(table, rotary_dim, is_neox)
