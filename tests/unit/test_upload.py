# SPDX-License-Identifier: Apache-2.0
"""Host numbers on their way to a device that the host does not wait for."""

from typing import Any

import numpy as np
import pytest
import torch

from sglang_reasoncache.cache.upload import upload


@pytest.mark.parametrize("values", [[3, 1, 2], np.array([3, 1, 2])])
def test_lists_and_arrays_go_through_pinned_memory(
    values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``meta`` is the device. Pinning needs a GPU, so a copy stands in for it; that arrays cannot
    be pinned where they are made is PyTorch's own refusal."""
    pinned: list[torch.Tensor] = []

    def pin(made: torch.Tensor) -> torch.Tensor:
        pinned.append(made)
        return made.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(np.arange(3), pin_memory=True)
    sent = upload(values, "meta", torch.int32)
    assert (sent.device.type, sent.dtype, sent.shape) == ("meta", torch.int32, (3,))
    [host] = pinned
    assert host.device.type == "cpu" and host.tolist() == list(values)
