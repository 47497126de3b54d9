# SPDX-License-Identifier: Apache-2.0
"""Finds the policies by name: those that share or evict KV of running requests, or select what steps read."""

import importlib
import pkgutil
from collections.abc import Mapping

from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.selection.quest import Quest

_POLICIES = "sglang_reasoncache.eviction.policies"
#: Name -> class of each evicting policy of this package, which needs one line here.
BUILT_IN: Mapping[str, str] = {
    "streamingllm": f"{_POLICIES}.streamingllm:StreamingLLM",
    "random": f"{_POLICIES}.random_attention:RandomAttention",
    "l2norm": f"{_POLICIES}.l2norm:L2Norm",
    "keydiff": f"{_POLICIES}.keydiff:KeyDiff",
    "h2o": f"{_POLICIES}.h2o:H2O",
    "snapkv": f"{_POLICIES}.snapkv:SnapKV",
    "rkv": f"{_POLICIES}.rkv:RKV",
    "triattention": f"{_POLICIES}.triattention:TriAttention",
}
#: Name -> class of each policy that selects what decode steps read.
SELECTING: Mapping[str, type[Quest]] = {"quest": Quest}
#: The policy that shares.
SHARING = "reasoncache"
#: The policy that does nothing.
NOTHING = "none"


def evictor_class(name: str) -> type[Evictor]:
    """The class of an evicting policy: a name in ``BUILT_IN``, or the ``module:Class`` of an installed package.
    Raises KeyError for any other name, and ValueError, which says why, if there is no such policy."""
    module, colon, of = name.partition(":")
    if not colon:
        kind: type[Evictor] = pkgutil.resolve_name(BUILT_IN[name])
        return kind
    try:
        member = getattr(importlib.import_module(module), of)
    except Exception as error:  # the module may raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not (isinstance(member, type) and issubclass(member, Evictor) and member is not Evictor):
        raise ValueError("not a class that extends Evictor")
    return member
