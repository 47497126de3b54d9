# SPDX-License-Identifier: Apache-2.0
"""Encoders of steps that the ReasonCache and MemShare papers compare with counts of tokens: the model's own
embedding layer, and Sentence-BERT. A server has neither, because its filter process has no torch."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from eval.fidelity.cache import Reader
from sglang_reasoncache.filter.lexical import Floats, length_factors
from sglang_reasoncache.filter.segment import Step

#: The name of the encoder that takes the mean of the model's embeddings of a step's tokens.
EMBEDDING = "embedding"
#: Maps a step to a vector.
Encode = Callable[[Step], Floats]


class DenseIndex:
    """The newest ``max_history_steps`` earlier steps, compared by the cosine of vectors. Takes the place of
    :class:`~sglang_reasoncache.filter.lexical.LexicalIndex`; below 0, a cosine counts as 0."""

    def __init__(self, encode: Encode, max_history_steps: int, length_factor: bool = True) -> None:
        self._encode = encode
        self._length_factor = length_factor
        self._steps: deque[Step] = deque(maxlen=max_history_steps)
        self._vectors: deque[Floats] = deque(maxlen=max_history_steps)
        # The step that was compared last and its vector. The text of a step may be gone when it is added.
        self._newest: tuple[Step, Floats] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        return self._steps[index]

    def add(self, step: Step) -> None:
        self._vectors.append(self._unit(step))
        self._steps.append(step)

    def similarities(self, step: Step) -> Floats:
        """Similarity of ``step`` to every remembered step, oldest first: float64 ``[len(self)]``."""
        sims = np.clip(np.stack(self._vectors) @ self._unit(step), 0.0, 1.0)
        if self._length_factor:
            sims *= length_factors(np.array([earlier.num_chars for earlier in self._steps]), step)
        return sims

    def _unit(self, step: Step) -> Floats:
        if self._newest is None or self._newest[0] is not step:
            vector = np.asarray(self._encode(step), dtype=np.float64)
            self._newest = step, vector / max(float(np.linalg.norm(vector)), 1e-12)
        return self._newest[1]


def encoder(name: str, reader: Reader) -> Encode:
    """The encoder ``name``: :data:`EMBEDDING`, or the folder of a sentence-transformers model. Raises
    ValueError for another name, and if the package is missing or cannot read the folder."""
    if name == EMBEDDING:
        table = reader.model.get_input_embeddings().weight.detach()

        def mean(step: Step) -> Floats:
            vector: Floats = table[[*step.bag.elements()]].mean(0).double().cpu().numpy()
            return vector

        return mean
    if not Path(name).is_dir():
        raise ValueError(f"encoder must be {EMBEDDING!r} or a folder, got {name!r}")
    try:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(name, device=str(reader.device), local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"encoder {name!r} cannot be read: {error}") from error

    def encoded(step: Step) -> Floats:
        vector: Floats = model.encode(step.text, show_progress_bar=False)
        return vector

    return encoded
