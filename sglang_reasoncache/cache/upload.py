# SPDX-License-Identifier: Apache-2.0
"""Host numbers as a tensor on the pool's device, without waiting for that device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(
    values: Sequence[Any] | np.ndarray, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """``torch.tensor(values)`` on ``device``."""
    if torch.device(device).type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # A copy from pinned memory is only queued; any other waits for the forward in flight.
    # Pinned afterwards: ``torch.tensor(pin_memory=True)`` refuses numpy arrays.
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
