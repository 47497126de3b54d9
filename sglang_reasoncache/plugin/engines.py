# SPDX-License-Identifier: Apache-2.0
"""The step filter of a scheduler, out of what SGLang and the operator said."""

from __future__ import annotations

import logging
from typing import Any

from sglang_reasoncache import native
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.span import ReasoningMarkers
from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of
from sglang_reasoncache.plugin.encoder import EncoderSource

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Compile the CPU kernels before the scheduler processes want them."""
    try:
        native.prepare_for_children()
    except native.NativeUnavailable as error:
        logger.warning("reasoncache: no native code, kernels run in PyTorch: %s", error)


def make_engine(
    config: ReasonCacheConfig,
    filter_config: FilterConfig,
    tokenizer: Any,
    markers: ReasoningMarkers | None,
    encoder: EncoderSource | None,
) -> FilterProcess:
    """Start the filter of one scheduler.

    Args:
        config: the operator's settings.
        filter_config: made of them.
        tokenizer: of the served model.
        markers: tokens around its reasoning, None: all output counts.
        encoder: replaces the bag of tokens in an ablation.

    Raises:
        ValueError: a tokenizer or a sentence model that cannot be read.
        RuntimeError: the process does not start.
    """
    model, matrix = encoder or ("", None)
    ids = None if markers is None else (markers.start_ids, markers.end_ids)
    vocabulary = vocabulary_of(tokenizer)
    return FilterProcess(filter_config, vocabulary, ids, config.max_pending, model, matrix)
