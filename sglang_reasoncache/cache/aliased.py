# SPDX-License-Identifier: Apache-2.0
"""Lets a path of the prefix tree name a slot more than once. The slot counts once, at its topmost entry.

There is one topmost entry: a second entry comes from a request whose row named the slot before, so it is
published below the first one. (Rows are published only up to the first slot that another running request
had.) SGLang locks whole paths and evicts leaves first, so the node of the topmost entry is locked whenever a
node below it is, and is evicted last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sglang_reasoncache import compat

#: The key of our entry in SGLang's metadata of a node.
_KEY = "reasoncache"


class Leaf(NamedTuple):
    """What the plugin notes of a node, or of the part of a row that becomes a node.

    Attributes:
        known: What the host knows of its slots, int64 ``[positions]``; None: the node shares none.
        aliases: Offsets whose slot is counted at another entry of the path, ascending.
        inexact: First offset with approximate KV, as at and behind a shared position; None: there is
            none.
    """

    known: np.ndarray | None = None
    aliases: tuple[int, ...] = ()
    inexact: int | None = None

    def split(self, at: int) -> tuple[Leaf, Leaf]:
        known = (None, None) if self.known is None else (self.known[:at], self.known[at:])
        above = tuple(offset for offset in self.aliases if offset < at)
        below = tuple(offset - at for offset in self.aliases if offset >= at)
        if self.inexact is None:
            return Leaf(known[0], above), Leaf(known[1], below)
        first = self.inexact if self.inexact < at else None
        return Leaf(known[0], above, first), Leaf(known[1], below, max(self.inexact - at, 0))


PLAIN = Leaf()


def leaf_of(node: Any) -> Leaf:
    """What the plugin noted of a node of SGLang's Python core."""
    found: Leaf = node.component_data[compat.ComponentType.FULL].metadata.get(_KEY, PLAIN)
    return found


class AliasedComponent(compat.FullComponent):
    """SGLang's component of full attention. Its nodes count slots instead of positions.

    Attributes:
        leaf: Notes of the row that is being inserted, from the first position that the tree lacks on.
        aliased: Entries of the tree that do not count (aliases).
    """

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.leaf, self.aliased = PLAIN, 0

    def reclaimable_value_len(self, node: Any) -> int:
        length: int = super().reclaimable_value_len(node)
        return length - len(leaf_of(node).aliases)

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: list[Any]
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if not is_new_leaf:
            return
        known, aliases, inexact = self.leaf
        if leaf_of(node.parent).inexact is not None:
            inexact = 0
        elif inexact is not None:
            inexact = inexact if inexact < len(node.key) else None
        leaf = Leaf(known, aliases, inexact)
        if known is not None or inexact is not None:
            node.component_data[self.component_type].metadata[_KEY] = leaf
            self.aliased += len(aliases)
            self.tree_core.adjust_component_size(node.id, self.component_type, -len(aliases))

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        super().redistribute_on_node_split(new_parent, child)
        of_child = child.component_data[self.component_type].metadata
        if _KEY in of_child:
            above, below = of_child[_KEY].split(len(new_parent.key))
            new_parent.component_data[self.component_type].metadata[_KEY] = above
            of_child[_KEY] = below

    def evict_component(
        self, node: Any, device_frees: dict[Any, Any], *rest: Any, **named: Any
    ) -> tuple[int, int]:
        ours = node.component_data[self.component_type]
        leaf, value = leaf_of(node), ours.value
        freed: tuple[int, int] = super().evict_component(node, device_frees, *rest, **named)
        frees = device_frees[self.component_type]
        if leaf.known is not None and frees and frees[-1] is value:
            # We free the slots, because the notes tell which of them other entries name.
            frees.pop()
            self.cache.token_to_kv_pool_allocator.free_known(value, leaf.known)
        ours.metadata.pop(_KEY, None)
        self.aliased -= len(leaf.aliases)
        return freed
