# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified prefix cache (radix tree), extended to rows (requests' block tables) that share slots.

A row is published (entered into the tree core) up to the first position that was redirected to another slot,
was evicted, or has a slot that another row names or named. So no node names a slot twice, the core's KV is
exact (as without this plugin), and no row names a slot of an unlocked node. SGLang's tree cores (Rust, Python)
therefore count evictable slots correctly. What a finished request shared becomes a continuation of its path
(``continuations.py``), which this package counts, matches, locks and evicts beside the core. A continuation may
borrow slots of its path: it is evicted before them.

Each module extends the class of the module before by one concern: ``base.py``, ``evicting.py``,
``publishing.py``, ``retracting.py``, ``shared.py``."""

from sglang_reasoncache.cache.tree.shared import SharedRadixCache

__all__ = ["SharedRadixCache"]
