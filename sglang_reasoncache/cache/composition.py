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
        made.documents, made.nodes, made.again = documents, tuple(nodes), again
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


def marked(req: Request | None) -> Documents | None:
    """The documents that a request marks. None if it marks none, marks them wrongly, or fails ``takes_part``.
    The result is stored in the request, because a waiting request is looked up in the tree again and again."""
    if req is None:
        return None
    if not hasattr(req, DOCUMENTS):
        found, custom_params = None, getattr(req.sampling_params, "custom_params", None)
        # Building the error message may raise too: its repr of the value can exceed the recursion limit.
        with suppress(Exception):
            found = documents_of(custom_params, len(req.origin_input_ids))
        setattr(req, DOCUMENTS, found if takes_part(req) else None)
    documents: Documents | None = getattr(req, DOCUMENTS)
    return documents


def compose(documents: Documents, key: Any, match: Callable[[Any], Any]) -> Composition | None:
    """Compose the documents of a prompt, up to the first document that the tree lacks. Returns None if
    fewer than two are composed, because a prefix with a single document is an ordinary prefix.

    ``key``: SGLang's key of the prompt. ``match``: the tree's ``match_prefix``.
    """
    tokens, nodes = key.token_ids, list[int]()
    base = tokens[: documents.start]
    for start, end in documents.spans():
        if end > len(key):
            break
        alone = compat.RadixKey(base + tokens[start:end], key.extra_key, cache_salt=key.cache_salt)
        found = match(compat.MatchPrefixParams(key=alone))
        if found.device_prefix_len < len(alone):
            break
        nodes.append(found.last_device_node)
    return Composition(documents, nodes) if len(nodes) > 1 else None
