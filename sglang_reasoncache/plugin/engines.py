# SPDX-License-Identifier: Apache-2.0
"""Which step engine serves: the native one wherever it can."""

from __future__ import annotations

import logging
from typing import Any

from sglang_reasoncache import native
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.encoder import StepEncoder
from sglang_reasoncache.filter.engine import InlineEngine, StepEngine
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.span import ReasoningMarkers, ReasoningSpan
from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of
from sglang_reasoncache.native.engine import NativeEngine, supports

logger = logging.getLogger(__name__)

_PYTHON_ONLY = (
    "random sharing, a structure tolerance and other encoders than tokens are Python only"
)


def prepare(config: ReasonCacheConfig) -> None:
    """Compile the native library before the scheduler processes want it.

    Distances use it as well, whichever engine compares steps.
    """
    try:
        native.prepare_for_children()
    except native.NativeUnavailable as error:
        logger.warning(
            "reasoncache: no native code, steps and distances are compared in Python: %s", error
        )


def make_engine(
    config: ReasonCacheConfig,
    filter_config: FilterConfig,
    tokenizer: Any,
    markers: ReasoningMarkers | None,
    encoder: StepEncoder | None,
) -> StepEngine:
    """The engine for one scheduler.

    Args:
        config: the operator's settings.
        filter_config: made of them.
        tokenizer: of the served model.
        markers: tokens around its reasoning, None: all output counts.
        encoder: replaces the bag of tokens in an ablation.

    Raises:
        ValueError: a tokenizer that cannot be read.
    """
    vocabulary = vocabulary_of(tokenizer)
    classes = TokenClasses(vocabulary)
    try:
        return _native(config, filter_config, classes, vocabulary, markers)
    except (native.NativeUnavailable, NotImplementedError) as error:
        logger.warning("reasoncache: steps are compared in the scheduler's thread: %s", error)

    def make_filter(start_position: int, inside: bool) -> RequestFilter:
        span = None
        if markers is not None:
            span = ReasoningSpan(markers.start_ids, markers.end_ids, inside)
        return RequestFilter(
            filter_config, classes, vocabulary, start_position, span=span, encoder=encoder
        )

    return InlineEngine(make_filter)


def _native(
    config: ReasonCacheConfig,
    filter_config: FilterConfig,
    classes: TokenClasses,
    vocabulary: Any,
    markers: ReasoningMarkers | None,
) -> NativeEngine:
    if not supports(filter_config):
        raise NotImplementedError(_PYTHON_ONLY)
    return NativeEngine(
        native.library(),
        filter_config,
        classes,
        vocabulary,
        () if markers is None else sorted(markers.start_ids),
        () if markers is None else sorted(markers.end_ids),
        config.max_pending,
    )
