# SPDX-License-Identifier: Apache-2.0
"""Composes the prefix of a prompt with marked documents from several paths of the prefix tree. Each path holds
the *base* (the tokens before the first document), then one document. The base is read from the first path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.compat.carriers import DOCUMENTS
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import Documents, documents_of, takes_part

if TYPE_CHECKING:
    from sglang_reasoncache.cache.repair import RepairedRow

NO_POSITIONS = np.zeros(0, dtype=np.int64)


class Composition(int):
    """A composed prefix, used where SGLang expects the id of a tree node. As an integer it is the id of the
    node where the path of the base and the first document ends.

    Attributes:
        documents: The documents that the client marked.
        nodes: For each composed document, the id of the node where its path ends.
        again: Positions that are computed again, int64 ``[n]`` ascending. The first document has no such
            positions, because it was prefilled at the position where it is used.
        repaired: The prefix's block table entries. None if ``again`` is empty, or until SGLang asks for these.
    """

    documents: Documents
    nodes: tuple[int, ...]
    again: np.ndarray
    repaired: RepairedRow | None = None

    def __new__(
        cls, documents: Documents, nodes: Sequence[int], again: np.ndarray = NO_POSITIONS
    ) -> Composition:
        made = super().__new__(cls, nodes[0])
        made.documents = documents
        made.nodes = tuple(nodes)
        made.again = again
        return made

    @property
    def length(self) -> int:
        """Number of tokens in the base and the composed documents."""
        return self.documents.ends[len(self.nodes) - 1]

    @property
    def kept(self) -> int:
        """Number of tokens of the prefix that are not computed again. SGLang is told that the first ``kept``
        tokens of the prompt are cached and all later tokens must be computed."""
        return self.length - len(self.again)

    def slots(self, path_slots: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The cached slots of the whole prefix, int64 ``[length]``. ``path_slots``: returns the slots of the
        path that ends in a given node."""
        # Slices are cloned, because a slice would keep its whole path in memory.
        starts = 0, *[self.documents.start] * (len(self.nodes) - 1)
        parts = zip(self.nodes, starts, strict=True)
        return torch.cat([path_slots(node)[start:].clone() for node, start in parts])


class CompositionLock(list[Any]):
    """SGLang's locks, one for each path of a composition."""


class CachedDocuments:
    """The documents that a request marks, and where earlier look-ups found them in the tree. SGLang looks up a
    waiting request again and again, and to match all its documents takes milliseconds.

    Attributes:
        documents: The documents that the client marked.
        nodes: Number of a document -> id of the node where its path ended. A node in the tree keeps its path:
            if SGLang splits the node, the lower part keeps the id. No id is used twice.
        chosen: Length of the composed prefix, and the positions that a repair chose in it.
        chosen_by: The ``Repairs`` that chose. A flush of the cache makes new ones.
        digest: Of the prompt's tokens. None until a repair by attention needs it.
        scores: Scores of the positions, fp32 ``[length]`` on the device, if the request only computes scores.
    """

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.nodes: dict[int, int] = {}
        self.chosen: tuple[int, np.ndarray] = (0, NO_POSITIONS)
        self.chosen_by: object = None
        self.digest: bytes | None = None
        self.scores: torch.Tensor | None = None
        # Number of the document that the next look-up matches, even if its node is known.
        self._turn = 0

    def compose(self, key: Any, match: Callable[[Any], Any], tree_core: Any) -> Composition | None:
        """Compose the documents of a prompt, up to the first document that the tree lacks. Returns None if
        fewer than two are composed, because a prefix with a single document is an ordinary prefix.

        Matches only documents that earlier look-ups did not find or that were evicted, and one more, in turn: a
        match makes a path recently used, so a waiting request's documents are not evicted first.

        ``key``: SGLang's key of the prompt. ``match``: the tree's ``match_prefix``.
        """
        nodes = list[int]()
        for number, (start, end) in enumerate(self.documents.spans()):
            if end > len(key):
                break
            if number == self._turn or not self._is_cached(number, tree_core):
                self._match(number, start, end, key, match)
            if number not in self.nodes:
                break
            nodes.append(self.nodes[number])
        self._turn = (self._turn + 1) % len(self.documents.ends)
        return Composition(self.documents, nodes) if len(nodes) > 1 else None

    def _is_cached(self, number: int, tree_core: Any) -> bool:
        """Whether an earlier look-up found a document, and its path is still in the tree."""
        if number not in self.nodes:
            return False
        try:
            return not tree_core.is_full_device_evicted(self.nodes[number])
        except KeyError:  # The tree has no node with this id any more.
            return False

    def _match(
        self, number: int, start: int, end: int, key: Any, match: Callable[[Any], Any]
    ) -> None:
        """Look up the base with the document at positions ``[start, end)`` behind it."""
        self.nodes.pop(number, None)
        tokens = key.token_ids[: self.documents.start] + key.token_ids[start:end]
        alone = compat.RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt)
        result = match(compat.MatchPrefixParams(key=alone))
        if result.device_prefix_len == len(alone):
            self.nodes[number] = result.last_device_node


def marked(req: Request | None) -> CachedDocuments | None:
    """The documents that a request marks. None if it marks none, marks them wrongly, or fails ``takes_part``.
    The result is stored in the request."""
    if req is None:
        return None
    if not hasattr(req, DOCUMENTS):
        parsed = None
        custom_params = getattr(req.sampling_params, "custom_params", None)
        # Building the error message may raise too: its repr of the value can exceed the recursion limit.
        with suppress(Exception):
            parsed = documents_of(custom_params, len(req.origin_input_ids))
        mine = None if parsed is None or not takes_part(req) else CachedDocuments(parsed)
        setattr(req, DOCUMENTS, mine)
    documents: CachedDocuments | None = getattr(req, DOCUMENTS)
    return documents
