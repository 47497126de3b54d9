# SPDX-License-Identifier: Apache-2.0
"""Nothing of ours ends a scheduler: what we raise while it runs ends sharing and evicting."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from sglang_reasoncache.cache.ranks import RankFailed, Ranks

logger = logging.getLogger(__name__)

_LONGEST = 300


class Containment:
    """A ``with`` around everything of ours that SGLang calls at run time.

    An exception is logged once, and ``disable`` called with a reason, once: here at once, under
    tensor parallelism at the next reduction, by all ranks. Until then this rank goes on as ever.
    """

    def __init__(self, ranks: Ranks, disable: Callable[[str], None]) -> None:
        self._ranks, self._disable = ranks, disable
        self.alone = ranks.alone
        self._reason = ""

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
        elif isinstance(error, Exception):
            self._failed(error)
        else:
            return False
        return True

    def together(self, work: Callable[..., None], *arguments: object) -> None:
        """Call what makes reductions. Its last one is here, whatever happens in it: a rank that
        fails ahead of the others still meets them, at the next reduction that they make."""
        with self:
            try:
                work(*arguments)
            except Exception as error:
                self._failed(error)
            self._ranks.agree()

    def once_more(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What ``work`` returns, which SGLang cannot go on without: where it fails, it is called
        again, with memory given back. It can be, because nothing that counts changed before; not
        while a CUDA graph is captured. What fails again ends the scheduler."""
        try:
            return work(*arguments, **named)
        except Exception as error:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise
            self._failed(error)
        # Here, where the traceback holds nothing any more.
        gc.collect()
        torch.cuda.empty_cache()
        return work(*arguments, **named)

    def _failed(self, error: Exception) -> None:
        if self._reason:
            return
        try:
            self._reason = f"{type(error).__name__}: {error}"[:_LONGEST]
        except Exception:  # its message can fail, too
            self._reason = type(error).__name__
        self._ranks.failed = True
        logger.error("reasoncache: %s", self._reason, exc_info=error)
        if self._ranks.alone:
            self._end(self._reason)

    def _end(self, reason: str) -> None:
        try:
            told = "reasoncache: disabled until the server is started again: %s"
            logger.error(told, reason)
            self._disable(reason)
        except Exception:
            logger.exception("reasoncache: disabled, but not everything of it ended")
