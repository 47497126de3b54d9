# SPDX-License-Identifier: Apache-2.0
"""What this plugin cannot run together with, refused at start-up with flag and reason."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sglang_reasoncache import compat
from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.compat.types import ServerArgs
from sglang_reasoncache.config import ReasonCacheConfig

_OWN_TREE = "it brings its own prefix cache or KV tier, which does not count shared slots"
_OWN_ROW = "a session keeps its row after the request"
_RANKS = "ranks would have to agree on decisions; not tested"

#: Field of SGLang's record -> why it is in the way when it is set, or a size above 1.
CONFLICTS: Mapping[str, str] = {
    "radix_cache_backend": "the prefix cache must be ours to count shared slots",
    "enable_hierarchical_cache": _OWN_TREE,
    "enable_lmcache": _OWN_TREE,
    "enable_flexkv": _OWN_TREE,
    "enable_hisparse": _OWN_TREE,
    "enable_unified_memory": "its pool hands out virtual slots",
    "enable_unified_cache_external_linker": _OWN_TREE,
    "enable_streaming_session": _OWN_ROW,
    "enable_session_radix_cache": _OWN_ROW,
    "speculative_algorithm": "a draft may rewrite positions that are already shared",
    "disaggregation_mode": "transfers address slots by row and would send a shared one twice",
    "kv_canary": "a canary marks slots we may free",
    "enable_return_routed_experts": "experts are recorded by slot",
    "enable_return_indexer_topk": "indices are recorded by slot",
    "prefill_only_disable_kv_cache": "there is no KV cache to share",
    "skip_tokenizer_init": "steps are found in text",
    "strip_thinking_cache": "it releases output slots outside the prefix cache",
    "dcp_size": "a slot is spread over ranks",
    "pp_size": "the distance needs every layer on one rank",
    "dllm_algorithm": "a diffusion model rewrites its KV",
    "enable_dp_attention": _RANKS,
    "attn_dp_size": _RANKS,
    "attn_cp_size": "a request is spread over ranks",
    "use_ray": "plugins are not tested under Ray",
}
#: Likewise, in the way of corrected positions on CUDA only; as-cached runs SGLang's backends
#: as they are.
CORRECTED_CONFLICTS: Mapping[str, str] = {
    "enable_pdmux": "it makes one attention backend a stream",
    "enable_two_batch_overlap": "it cuts a batch between two attention backends",
    "enable_mis": "its positions are not those of the row",
    "enable_torch_compile": "our kernels would be traced",
    "enable_deterministic_inference": "a batch decides which kernel reads its requests",
}
#: Values of a field that is not set.
_UNSET = (None, False, "", "null", "none", compat.TREE_BACKEND)

_ONE_BACKEND = f"use {', '.join(compat.EVICTION_BACKENDS)}, one for prefill and decode"
#: What is in the way of a policy, after its name; ``backend`` is flag and name of the attention.
READS_EVERYTHING = f"selects what a step reads, which {{backend}} does not ask; {_ONE_BACKEND}"
READS_EVICTED = f"evicts positions, which {{backend}} would read; {_ONE_BACKEND}"
NO_STATISTICS = "needs attention statistics, which {backend} does not give; use " + " or ".join(
    compat.EVICTION_BACKENDS
)
NO_MEMORY_FOR_BOUNDS = (
    "keeps the least and largest key of each page beside the pool: {error}; lower "
    "--mem-fraction-static, or raise --page-size"
)
NO_MEMORY_FOR_WEIGHTS = (
    "keeps the weights of the newest {queries} queries (window of snapkv, alpha of rkv) apart: "
    "{error}; lower that, or --context-length"
)
_WHOLE_PAGES = (
    "selects whole pages: --page-size must be at least 2 (the paper has 16), got {page_size}"
)
_OTHER_KEYS = f"knows pages by the keys that attention wrote; {flag_of('apply')}=copy writes others"


def of_policy(reason: str, policy: str, **values: object) -> ValueError:
    """One of the texts above with its values."""
    return ValueError(f"{flag_of('policy')} {policy} {reason.format(**values)}")


def check(args: ServerArgs) -> None:
    """Raises ValueError naming every flag in the way. ``args``: raw ``ServerArgs``."""
    _refuse("--enable-reasoncache", _found(args, CONFLICTS))
    check_page_size(args.page_size or 1)


def check_corrected(args: ServerArgs, requested_by: str) -> None:
    """Likewise, in the way of corrected positions on CUDA. ``requested_by`` begins the message."""
    found = _found(args, CORRECTED_CONFLICTS)
    variable = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    if _is_set(variable):
        found.append(f"{variable} (it replays one preparation for both variants of a decode graph)")
    _refuse(requested_by, found)


def _found(args: ServerArgs, conflicts: Mapping[str, str]) -> list[str]:
    given = {field: getattr(args, field, None) for field in conflicts}
    return [
        f"--{field.replace('_', '-')} ({conflicts[field]})"
        for field, value in given.items()
        if value not in _UNSET and not (field.endswith("_size") and value <= 1)
    ]


def _refuse(subject: str, found: list[str]) -> None:
    if found:
        raise ValueError(f"{subject} cannot be combined with: {'; '.join(found)}")


def check_evicting(args: ServerArgs, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a flag asks for attention that reads evicted positions."""
    if config.evictions:
        _check_backends(args, READS_EVICTED, config.policy)


def check_selector(args: ServerArgs, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a policy selects what is read and a flag is in its way."""
    selector = config.policies.selector
    if selector is None:
        return
    check_selected_page(selector.name, args.page_size or 1)
    if config.apply == "copy":
        raise of_policy(_OTHER_KEYS, selector.name)
    _check_backends(args, READS_EVERYTHING, selector.name)


def _check_backends(args: ServerArgs, reason: str, policy: str) -> None:
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        name = getattr(args, field, None)
        if name is not None and name not in compat.EVICTION_BACKENDS:
            raise of_policy(reason, policy, backend=f"--{field.replace('_', '-')} {name}")


def check_selected_page(policy: str, page_size: int) -> None:
    """Raises ValueError where a page is no more than a position.

    Asked twice: for the flag, and for the page size SGLang resolved to.
    """
    if page_size < 2:
        raise of_policy(_WHOLE_PAGES, policy, page_size=page_size)


def check_page_size(page_size: int) -> None:
    """Raises ValueError where SGLang's allocator debugging would trip over shared pages.

    Asked twice: for the flag, and for the page size SGLang resolved to.
    """
    variable = "SGLANG_DEBUG_MEMORY_POOL"
    if page_size > 1 and _is_set(variable):
        reason = f"at page size {page_size} (it counts a shared page as freed twice)"
        _refuse("--enable-reasoncache", [f"{variable} {reason}"])


def _is_set(variable: str) -> bool:
    # The words that SGLang takes for true.
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")
