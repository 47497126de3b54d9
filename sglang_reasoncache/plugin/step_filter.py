# SPDX-License-Identifier: Apache-2.0
"""The step filter of a scheduler, out of what SGLang and the operator said."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.encoder import EncoderChoice, Vector, require_sentence_transformers
from sglang_reasoncache.filter.segment import ReasoningMarkers

logger = logging.getLogger(__name__)

_FLAG = flag_of("encoder")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class EncoderSource(NamedTuple):
    """What the filter makes its encoder of: a sentence model, or float32 [vocabulary, dim]."""

    model: str
    matrix: Vector | None


def check_encoder(config: ReasonCacheConfig, tp_size: int) -> None:
    """Raises ValueError for an encoder that cannot work, before anything is loaded."""
    kind = EncoderChoice.parse(config.encoder).kind
    if kind == "tokens":
        return
    if tp_size > 1:
        reason = "each rank holds a part of the vocabulary"
        if kind == "sentence-bert":
            reason = "its results may differ between ranks"
        must = f"must run with --tp-size 1 ({reason}), got --tp-size {tp_size}"
        raise ValueError(f"{_FLAG}={kind} {must}")
    if kind == "sentence-bert":
        require_sentence_transformers()


def make_encoder(config: ReasonCacheConfig, model: Any, context: Any) -> EncoderSource | None:
    """What the filter needs for the operator's encoder; None for counts of tokens.

    ``model`` is the one SGLang loaded, ``context`` its ``TreeCacheBuildContext``. Raises
    ValueError, see :func:`check_encoder`, and for a model without a plain embedding layer.
    """
    choice = EncoderChoice.parse(config.encoder)
    if choice.kind == "tokens" or config.random_ratio is not None:
        return None  # random sharing compares nothing
    check_encoder(config, context.tp_size)
    if choice.kind == "sentence-bert":
        return EncoderSource(choice.model, None)
    matrix = _embedding(model)
    told = "reasoncache: step encoder: %d embeddings of dimension %d (%d MiB on the host)"
    logger.info(told, *matrix.shape, matrix.nbytes >> 20)
    return EncoderSource("", matrix)


def _embedding(model: Any) -> Vector:
    """Float32 copy of the input embedding on the host, [vocabulary, dim], for good."""
    try:
        weight = model.get_input_embeddings().weight
    # Some models have no such method, some one that wants token ids.
    except (AttributeError, TypeError) as error:
        needs = f"needs a model with get_input_embeddings(), got {type(model).__name__}"
        raise ValueError(f"{_FLAG}=embedding {needs}") from error
    plain = isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1]
    if not plain or weight.dtype not in _DTYPES:
        found = getattr(weight, "dtype", type(weight).__name__)
        raise ValueError(f"{_FLAG}=embedding needs an unquantised embedding layer, got {found}")
    copied = weight.detach().to(device="cpu", dtype=torch.float32, copy=True)
    return np.ascontiguousarray(copied.numpy())


def reasoning_markers(parser: str | None, tokenizer: Any) -> ReasoningMarkers | None:
    """Start and end tokens of the parser's format; None: the whole response is reasoning.

    A tool call that SGLang's detector takes for the end of reasoning is an end marker too.
    Formats whose markers are not single tokens are not followed, with a warning.
    """
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
    except Exception as error:
        # Detectors encode, and check, in ways of their own; SGLang refuses what it cannot use.
        why = f"--reasoning-parser {parser} cannot be followed ({error})"
        logger.warning("reasoncache: %s, the whole response counts as reasoning", why)
        return None
    others = getattr(detector, "request_selectable_think_end_tokens", ())
    others = (*others, getattr(detector, "tool_start_token", None))
    more = {_single(tokenizer, text) for text in others if text}
    ends = frozenset({end} | {token for token in more if token is not None})
    markers = ReasoningMarkers(frozenset({start}), ends, bool(detector.force_reasoning))
    logger.info("reasoncache: reasoning as of --reasoning-parser %s, %s", parser, markers)
    return markers


def _single(tokenizer: Any, text: str, ids: list[int] | None = None) -> int | None:
    """The one token of a marker; None for several, or for an unknown word's token."""
    if ids is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or str(tokenizer.decode(list(ids))).strip() != text.strip():
        return None
    return int(ids[0])
