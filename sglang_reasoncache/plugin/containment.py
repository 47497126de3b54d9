# SPDX-License-Identifier: Apache-2.0
"""Keeps the plugin's exceptions from ending a scheduler: an exception ends sharing and evicting instead."""

import gc
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from sglang_reasoncache.device.ranks import RankFailed, Ranks, RanksTorn

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_LONGEST = 300


class Containment:
    """A context manager around code of the plugin that SGLang's scheduler calls while it serves requests.

    This class suppresses exceptions, except RanksTorn. The first one is logged and makes every tensor-parallel
    rank call ``disable`` with a reason: immediately if there is a single rank, else at the next reduction over
    the ranks. Until that reduction the rank that failed goes on as before.
    """

    def __init__(self, ranks: Ranks, disable: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._disable = disable
        self._reason = ""
        self._ended = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, RankFailed):
            self._end(self._reason or "another tensor-parallel rank failed")
        elif isinstance(error, Exception) and not isinstance(error, RanksTorn):
            self._failed(error)
        else:
            return False
        return True

    def together(self, work: Callable[..., None], *arguments: object) -> None:
        """Call ``work``, which may make reductions over the ranks. Then make one more reduction, even after a
        failure: a rank that fails early must still take part in the next reduction of the other ranks."""
        with self:
            self._contained(work, *arguments)
            self._ranks.agree()

    def least(self, work: Callable[[], int]) -> int:
        """The smallest result of ``work``, which makes no reductions, on any rank, by one reduction. 0 if a
        rank failed."""
        with self:
            value = self._contained(work) or 0
            return 0 if self._ended else self._ranks.least(value)
        return 0

    def once_more(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of ``work``. SGLang cannot go on without this result.

        If ``work`` raises, sharing and evicting end (see the class), PyTorch's unused GPU memory is freed, and
        ``work`` is called a second time. So ``work`` must change nothing before it raises. An exception in the
        second call, or while a CUDA graph is captured, is not caught and ends the scheduler.
        """
        try:
            return work(*arguments, **named)
        except RanksTorn:
            raise
        except Exception as error:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise
            self._failed(error)
        # Memory is freed after the except block, because inside that block the traceback holds tensors.
        gc.collect()
        torch.cuda.empty_cache()
        return work(*arguments, **named)

    def _contained(self, work: Callable[..., Value], *arguments: object) -> Value | None:
        try:
            return work(*arguments)
        except RanksTorn:
            raise
        except Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        if self._reason:
            return
        try:
            self._reason = f"{type(error).__name__}: {error}"[:_LONGEST]
        except Exception:  # ``str(error)`` can raise, too
            self._reason = type(error).__name__
        self._ranks.failed = True
        logger.error("reasoncache: %s", self._reason, exc_info=error)
        if self._ranks.alone:
            self._end(self._reason)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            message = "reasoncache: disabled until the server is started again: %s"
            logger.error(message, reason)
            self._disable(reason)
        except Exception:
            logger.exception("reasoncache: disabled, but not everything of it ended")
