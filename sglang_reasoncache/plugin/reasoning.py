# SPDX-License-Identifier: Apache-2.0
"""Finds the tokens that begin and end reasoning, in the format of the server's ``--reasoning-parser``."""

import logging
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.filter.segment import ReasoningMarkers

logger = logging.getLogger(__name__)


def reasoning_markers(parser: str | None, tokenizer: Any) -> ReasoningMarkers | None:
    """The tokens that start and end reasoning in the format of ``parser``. None without a parser or tokenizer:
    the whole response then counts as reasoning. Other markers at which SGLang's detector ends reasoning, such
    as the start of a tool call, count as end tokens if they are single tokens. If the start or the end marker
    is not a single token, or the detector fails, the function logs a warning and returns None."""
    if not parser or tokenizer is None:
        return None
    try:
        detector = compat.ReasoningParser(
            model_type=parser, stream_reasoning=False, tokenizer=tokenizer
        ).detector
        start = _single(tokenizer, detector.think_start_token)
        end_ids = detector.get_think_end_token_ids(tokenizer)
        end = _single(tokenizer, detector.think_end_token, end_ids)
        if start is None or end is None:
            both = f"{detector.think_start_token!r} and {detector.think_end_token!r}"
            raise ValueError(f"{both} are not single tokens here")
        others = getattr(detector, "request_selectable_think_end_tokens", ())
        others = (*others, getattr(detector, "tool_start_token", None))
        more = {_single(tokenizer, text) for text in others if text}
    except Exception as error:
        # A detector may raise any exception. SGLang itself refuses parsers that it cannot use.
        why = f"--reasoning-parser {parser} cannot be followed ({error})"
        logger.warning("reasoncache: %s, the whole response counts as reasoning", why)
        return None
    ends = frozenset({end} | {token for token in more if token is not None})
    markers = ReasoningMarkers(frozenset({start}), ends, bool(detector.force_reasoning))
    logger.info("reasoncache: reasoning as of --reasoning-parser %s, %s", parser, markers)
    return markers


def _single(tokenizer: Any, text: str, ids: list[int] | None = None) -> int | None:
    """The token id of the marker ``text``. None if the tokenizer splits the marker or does not know it."""
    if ids is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 and hasattr(tokenizer, "convert_tokens_to_ids"):
        # mistral-common never encodes special tokens from text. For a text that is no token, this is another
        # token, such as the unknown one, or None.
        token_id = tokenizer.convert_tokens_to_ids(text)
        ids = [] if token_id is None else [token_id]
    if len(ids) != 1 or str(tokenizer.decode(list(ids))).strip() != text.strip():
        return None
    return int(ids[0])
