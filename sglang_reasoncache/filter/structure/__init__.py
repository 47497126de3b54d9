# SPDX-License-Identifier: Apache-2.0
"""Formal content of a step as labelled ordered trees (ReasonCache, stage 1).

Mathematics and code become trees whose labels are operators, variables and
constants; two formal steps may share memory only when their trees agree.
Text is read, never evaluated, and every read is bounded.
"""

from sglang_reasoncache.filter.structure.limits import Limits
from sglang_reasoncache.filter.structure.signature import (
    Signature,
    SignatureKind,
    same_structure,
    signature,
)
from sglang_reasoncache.filter.structure.tree import Tree

__all__ = ["Limits", "Signature", "SignatureKind", "Tree", "same_structure", "signature"]
