# SPDX-License-Identifier: Apache-2.0
"""Lists the policies, which share or evict KV of running requests, by name."""

import pkgutil
from collections.abc import Mapping

from sglang_reasoncache.eviction.policies.evictor import Evictor

_POLICIES = "sglang_reasoncache.eviction.policies"
#: Name -> class of each evicting policy; a new policy needs one line here.
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
#: The policy that shares.
SHARING = "reasoncache"
#: The policy that does nothing.
NOTHING = "none"


def evictor_class(name: str) -> type[Evictor]:
    """The class of an evicting policy. Raises KeyError for a name that is not in ``BUILT_IN``."""
    kind: type[Evictor] = pkgutil.resolve_name(BUILT_IN[name])
    return kind
