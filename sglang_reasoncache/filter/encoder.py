# SPDX-License-Identifier: Apache-2.0
"""A step as one dense vector: the papers compare counts of token ids (:mod:`filter.lexical`,
which needs no encoder) with the model's own embedding layer and with Sentence-BERT."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.filter.lexical import Floats, LexicalIndex
from sglang_reasoncache.filter.segment import Step

Vector = npt.NDArray[np.float32]

ENCODERS = ("tokens", "embedding", "sentence-bert")
ENCODER_BOUND = f"one of {', '.join(ENCODERS)}, sentence-bert:MODEL"
SENTENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

_FLAG = flag_of("encoder")
# Rows of the embedding added up at once; bounds what a long step takes.
_ROWS_AT_ONCE = 1024
# Float32 sums of unit vectors hold no more; equal steps come out as exactly 1,
# wherever the matrix product's order of summation puts their rows.
_DECIMALS = 6


class EncoderChoice(NamedTuple):
    """One of :data:`ENCODERS`, and the name or folder of its sentence model, else empty."""

    kind: str
    model: str

    @classmethod
    def parse(cls, text: object) -> EncoderChoice:
        """Read :data:`ENCODER_BOUND`; ValueError, naming flag, bound and value, for others."""
        if isinstance(text, str):
            kind, colon, model = text.partition(":")
            if kind == "sentence-bert" and bool(colon) == bool(model.strip()):
                return cls(kind, model or SENTENCE_MODEL)
            if kind in ENCODERS and kind != "sentence-bert" and not colon:
                return cls(kind, "")
        raise ValueError(f"{_FLAG} must be {ENCODER_BOUND}, got {text!r}")


# Of a step's tokens, the blank ones at its end left out, and text: a unit vector, float32 [dim],
# whose dot product is a similarity; zeros for a step that is similar to nothing, itself included.
StepEncoder = Callable[[Sequence[int], str], Vector]


def unit(vector: npt.ArrayLike) -> Vector:
    """``vector`` over its norm, float32; zeros if the norm is zero or not finite."""
    wide = np.asarray(vector, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norm = float(np.sqrt(wide @ wide))
    if not 0 < norm < np.inf:
        return np.zeros(wide.shape, dtype=np.float32)
    return (wide / norm).astype(np.float32)


class EmbeddingEncoder:
    """The normalised mean of the step's rows in the model's input embedding, float32
    [vocabulary, dim], kept, not copied. Ids without a row are left out. A row with NaN or
    infinity makes every step that uses it similar to nothing."""

    def __init__(self, matrix: Vector) -> None:
        self._matrix = matrix

    def __call__(self, step_token_ids: Sequence[int], text: str) -> Vector:
        num_rows, dim = self._matrix.shape
        known = [token for token in step_token_ids if 0 <= token < num_rows]
        total = np.zeros(dim)  # the mean's divisor would cancel out
        for at in range(0, len(known), _ROWS_AT_ONCE):
            rows = self._matrix[known[at : at + _ROWS_AT_ONCE]]
            with np.errstate(invalid="ignore"):
                total += rows.sum(axis=0, dtype=np.float64)
        return unit(total)


class SentenceEncoder:
    """Sentence-BERT on the CPU: ``model`` is a name on the Hugging Face hub, or a folder. A
    text above ``max_chars`` is similar to nothing. ValueError when it cannot be loaded."""

    def __init__(self, model: str, max_chars: int) -> None:
        require_sentence_transformers()
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(model, device="cpu").float().eval()
        # Hub, network, file formats: each library below has its own exceptions.
        except Exception as error:
            raise ValueError(
                f"{_FLAG}=sentence-bert must name a sentence model that can be loaded, "
                f"got {model!r}: {type(error).__name__}: {error}"
            ) from error
        self._max_chars = max_chars
        self._dim = len(self._encode("a"))

    def __call__(self, step_token_ids: Sequence[int], text: str) -> Vector:
        text = text.strip()
        if not 0 < len(text) <= self._max_chars:
            return np.zeros(self._dim, dtype=np.float32)
        return unit(self._encode(text))

    def _encode(self, text: str) -> npt.NDArray[np.floating]:
        encoded = self._model.encode([text], convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(encoded[0])


def require_sentence_transformers() -> None:
    """Raises ValueError, naming the extra, without the package ``sentence-transformers``."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ValueError(
            f"{_FLAG}=sentence-bert needs the package sentence-transformers; "
            'pip install "sglang-reasoncache[sentence-bert]"'
        )


class DenseIndex(LexicalIndex):
    """Earlier steps by vectors of one length: ReasonCache's formula with another encoder.

    Negative cosines count as they are, in the mean too, as the formula has it: a response whose
    steps point away from each other gets a threshold above ``strict`` and shares less.
    """

    def __init__(
        self, encoder: StepEncoder, max_history_steps: int, length_factor: bool = True
    ) -> None:
        super().__init__(max_history_steps, length_factor)
        self._encoder = encoder
        # One vector after the other.
        self._vectors = array("f")
        # The step that was encoded last: similarities() comes right before add().
        self._encoded: tuple[Step, Vector] | None = None

    def _put(self, step: Step) -> None:
        self._vectors.frombytes(self._vector(step).tobytes())
        self._encoded = None

    def _forget(self, step: Step) -> None:
        del self._vectors[: len(self._vectors) // (len(self) + 1)]

    def _cosines(self, step: Step) -> Floats:
        vector = self._vector(step)
        rows = np.frombuffer(self._vectors, np.float32).reshape(len(self), len(vector))
        sims = (rows @ vector).astype(np.float64)
        return np.clip(np.round(sims, _DECIMALS, out=sims), -1.0, 1.0, out=sims)

    def _vector(self, step: Step) -> Vector:
        """The step's vector, computed once; zeros unless all of it is finite."""
        if self._encoded is None or self._encoded[0] is not step:
            # The bag leaves out the blank tokens at the end, and so does this.
            vector = self._encoder(step.token_ids[: step.bag.total()], step.text)
            if not np.isfinite(vector).all():
                vector = np.zeros_like(vector)
            self._encoded = (step, vector)
        return self._encoded[1]
