# SPDX-License-Identifier: Apache-2.0
"""Copies host numbers to a tensor on a device without waiting for the device."""

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
    # A copy from pinned memory is queued; any other copy waits for the forward in flight.
    # The tensor is pinned afterwards, because ``torch.tensor(pin_memory=True)`` refuses numpy arrays.
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
