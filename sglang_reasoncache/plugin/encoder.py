# SPDX-License-Identifier: Apache-2.0
"""The operator's step encoder, from the model that SGLang loaded or from a sentence model."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.encoder import (
    SENTENCE_MODEL,
    EmbeddingEncoder,
    EncoderChoice,
    StepEncoder,
    Vector,
    unit,
)
from sglang_reasoncache.filter.structure import Limits

logger = logging.getLogger(__name__)

_FLAG = "--reasoncache-encoder"
_EXTRA = 'pip install "sglang-reasoncache[sentence-bert]"'
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class SentenceEncoder:
    """Sentence-BERT on the CPU, through the ``sentence-transformers`` package.

    The package cuts a text after the model's own bound (256 word pieces for the
    default model). A text above ``max_chars`` is similar to nothing.

    Args:
        model: name on the Hugging Face hub, or a folder.
        max_chars: longest text that is read.

    Raises:
        ValueError: the package is not installed, or the model cannot be loaded, for
            example without a network.
    """

    def __init__(self, model: str = SENTENCE_MODEL, max_chars: int = Limits().max_chars) -> None:
        _require_package()
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(model, device="cpu").float().eval()
        # Hub, network, file formats: each library below has its own exceptions.
        except Exception as error:
            raise ValueError(
                f"{_FLAG} sentence-bert must name a sentence model that can be loaded, "
                f"got {model!r}: {type(error).__name__}: {error}"
            ) from error
        self._max_chars = max_chars
        self._dim = len(self._encode("a"))

    def encode(self, step_token_ids: Sequence[int], text: str) -> Vector:
        text = text.strip()
        if not 0 < len(text) <= self._max_chars:
            return np.zeros(self._dim, dtype=np.float32)
        return unit(self._encode(text))

    def _encode(self, text: str) -> npt.NDArray[np.floating]:
        encoded = self._model.encode([text], convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(encoded[0])


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
        _require_package()


def make_encoder(config: ReasonCacheConfig, model: Any, context: Any) -> StepEncoder | None:
    """The encoder all requests of this scheduler share; None for counts of tokens.

    Args:
        config: the operator's settings.
        model: the model SGLang loaded, ``context.tp_worker.model_runner.model``.
        context: SGLang's ``TreeCacheBuildContext``.

    Raises:
        ValueError: see :func:`check_encoder`; a sentence model that cannot be
            loaded; a model without a plain embedding layer.
    """
    choice = EncoderChoice.parse(config.encoder)
    if choice.kind == "tokens" or config.random_ratio is not None:
        return None  # random sharing compares nothing
    check_encoder(config, context.tp_size)
    if choice.kind == "sentence-bert":
        return SentenceEncoder(choice.model)
    matrix = _embedding(model)
    logger.info(
        "reasoncache: step encoder: %d embeddings of dimension %d (%d MiB on the host)",
        *matrix.shape,
        matrix.nbytes >> 20,
    )
    return EmbeddingEncoder(matrix)


def _require_package() -> None:
    """Raises ValueError, naming the extra, without the ``sentence-transformers`` package."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ValueError(f"{_FLAG} sentence-bert needs the package sentence-transformers; {_EXTRA}")


def _embedding(model: Any) -> Vector:
    """Float32 copy of the input embedding on the host, shape [vocabulary, dim].

    A copy: weights updated later do not reach it, and steps encoded before and
    after such an update stay comparable.
    """
    try:
        weight = model.get_input_embeddings().weight
    # Some models have no such method, some one that wants token ids.
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{_FLAG} embedding needs a model with get_input_embeddings(), "
            f"got {type(model).__name__}"
        ) from error
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.dtype not in _DTYPES:
        found = f"{getattr(weight, 'dtype', type(weight).__name__)}"
        raise ValueError(f"{_FLAG} embedding needs an unquantised embedding layer, got {found}")
    copied = weight.detach().to(device="cpu", dtype=torch.float32, copy=True)
    matrix: Vector = copied.contiguous().numpy()
    return matrix
