# SPDX-License-Identifier: Apache-2.0
"""The operator's step encoder, from the model that SGLang loaded or by a sentence model's name."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.encoder import (
    EncoderChoice,
    Vector,
    require_sentence_transformers,
)

logger = logging.getLogger(__name__)

_FLAG = "--reasoncache-encoder"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class EncoderSource(NamedTuple):
    """What the filter makes its encoder of: a sentence model, or float32 [vocabulary, dim]."""

    model: str
    matrix: Vector | None


def check_encoder(config: ReasonCacheConfig, tp_size: int) -> None:
    """Refuse an encoder that cannot work, before anything is loaded.

    Raises:
        ValueError: more than one tensor-parallel rank, or a missing package.
    """
    kind = EncoderChoice.parse(config.encoder).kind
    if kind == "tokens":
        return
    if tp_size > 1:
        reason = (
            "each rank holds a part of the vocabulary"
            if kind == "embedding"
            # Ranks that differ in the last bit would share different blocks.
            else "its results may differ between ranks"
        )
        raise ValueError(
            f"{_FLAG} {kind} must run with --tp-size 1 ({reason}), got --tp-size {tp_size}"
        )
    if kind == "sentence-bert":
        require_sentence_transformers()


def make_encoder(config: ReasonCacheConfig, model: Any, context: Any) -> EncoderSource | None:
    """What the filter needs for the operator's encoder; None for counts of tokens.

    Args:
        config: the operator's settings.
        model: the model SGLang loaded, ``context.tp_worker.model_runner.model``.
        context: SGLang's ``TreeCacheBuildContext``.

    Raises:
        ValueError: see :func:`check_encoder`; a model without a plain embedding layer.
    """
    choice = EncoderChoice.parse(config.encoder)
    if choice.kind == "tokens" or config.random_ratio is not None:
        return None  # random sharing compares nothing
    check_encoder(config, context.tp_size)
    if choice.kind == "sentence-bert":
        return EncoderSource(choice.model, None)
    matrix = _embedding(model)
    logger.info(
        "reasoncache: step encoder: %d embeddings of dimension %d (%d MiB on the host)",
        *matrix.shape,
        matrix.nbytes >> 20,
    )
    return EncoderSource("", matrix)


def _embedding(model: Any) -> Vector:
    """Float32 copy of the input embedding on the host, shape [vocabulary, dim].

    A copy: weights updated later do not reach it, and steps encoded before and after such an
    update stay comparable.
    """
    try:
        weight = model.get_input_embeddings().weight
    # Some models have no such method, some one that wants token ids.
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{_FLAG} embedding needs a model with get_input_embeddings(), "
            f"got {type(model).__name__}"
        ) from error
    plain = isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1]
    if not plain or weight.dtype not in _DTYPES:
        found = f"{getattr(weight, 'dtype', type(weight).__name__)}"
        raise ValueError(f"{_FLAG} embedding needs an unquantised embedding layer, got {found}")
    copied = weight.detach().to(device="cpu", dtype=torch.float32, copy=True)
    matrix: Vector = copied.contiguous().numpy()
    return matrix
