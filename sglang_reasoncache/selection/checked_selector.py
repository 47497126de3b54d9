# SPDX-License-Identifier: Apache-2.0
"""Runs a selector; what it returns is checked before anything is read by it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from enum import Enum
from typing import Any

import torch

from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.selection.contract import Selector

logger = logging.getLogger(__name__)

#: How :class:`Selector` says what it reads whole, and the least of each.
_COUNTS = {"budget": 1, "whole_layers": 0}


class SelectionRefusal(Enum):
    """Why a selector's answer was not used as it is; values are metric labels."""

    MALFORMED = "malformed"
    """No bool tensor of the pages' shape: everything was read."""
    NEWEST = "newest"
    """The page that is being filled was left out: it was read."""
    POLICY_FAILED = "policy_failed"
    """The policy raised an exception: everything was read."""


class CheckedSelector:
    """One per attention backend.

    Args:
        name: Of the policy, for messages.
        selector: Decides.
        page: Positions of a page, above 1.

    Attributes:
        budget: Positions of a row that is read whole.
        whole_layers: Layers that read everything, the first ones.
        refusals: Of :class:`SelectionRefusal`, by value.

    Raises:
        ValueError: ``budget`` or ``whole_layers`` of the selector is no such number.
    """

    def __init__(self, name: str, selector: Selector, page: int) -> None:
        self.name = name
        self._selector = selector
        self._page = page
        # Read once: errors of another package's selector cannot be caught everywhere.
        self.budget, self.whole_layers = (self._count(key) for key in _COUNTS)
        self._failed = False
        self.refusals: Counter[str] = Counter()

    def pages(
        self,
        shares: torch.Tensor,
        held: torch.Tensor,
        newest: torch.Tensor,
        *,
        strict: bool = False,
        during: contextlib.AbstractContextManager[Any] | None = None,
    ) -> torch.Tensor | None:
        """bool ``[rows, pages]``, what it keeps; None: it failed or gave nonsense, read all.

        Args:
            shares, held, newest: See ``Selector.keep``. It gets copies of what others read too.
            strict: Raise instead of counting.
            during: Entered while it decides.

        Raises:
            ValueError: if ``strict``.
        """
        try:
            with during or contextlib.nullcontext():
                # Copies: later layers read the same, whatever a selector does to its own.
                keep = self._selector.keep(shares, held.clone(), newest.clone(), self._page)
        except Exception as error:
            if strict:
                raise ValueError(
                    f"{self._flag}: keep of a selector failed on {shares.device}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self.refusals[SelectionRefusal.POLICY_FAILED.value] += 1
            if not self._failed:
                self._failed = True
                logger.exception(
                    "reasoncache: policy %s failed, further failures count only", self.name
                )
            return None
        if (
            type(keep) is not torch.Tensor
            or keep.dtype != torch.bool
            or keep.shape != held.shape
            or keep.device != held.device
            or keep.layout != torch.strided
        ):
            if strict:
                raise ValueError(
                    f"{self._flag}: keep of a selector must give a plain bool tensor "
                    f"{list(held.shape)} on {held.device}, got {_named(keep)}"
                )
            self.refusals[SelectionRefusal.MALFORMED.value] += 1
            return None
        return keep

    @property
    def _flag(self) -> str:
        return f"{flag_of('policy')} {self.name}"

    def _count(self, key: str) -> int:
        try:
            found = getattr(self._selector, key)
        except Exception as error:
            found = error
        if type(found) is not int or found < _COUNTS[key]:
            raise ValueError(
                f"{self._flag}: {key} of a selector must be an integer of at least "
                f"{_COUNTS[key]}, got {found!r}"
            )
        return found


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)} on {value.device}"
    return type(value).__name__
