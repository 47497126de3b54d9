# SPDX-License-Identifier: Apache-2.0
"""What this plugin cannot run together with, refused at start-up with flag and reason."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sglang_reasoncache import compat
from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.compat.types import ServerArgs
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds

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
_GLUE_GRAPH = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
#: Values of a field that is not set.
_UNSET = (None, False, "", "null", "none", compat.TREE_BACKEND)


def check(args: ServerArgs) -> None:
    """Raises ValueError naming every flag in the way. ``args``: raw ``ServerArgs``."""
    found = _found(args, CONFLICTS)
    if found:
        raise ValueError("--enable-reasoncache cannot be combined with: " + "; ".join(found))
    check_page_size(args.page_size or 1)


def check_corrected(args: ServerArgs, asked: str) -> None:
    """Raises ValueError naming every flag in the way of corrected positions on CUDA.

    ``args``: raw ``ServerArgs``. ``asked``: the beginning of the message.
    """
    found = _found(args, CORRECTED_CONFLICTS)
    if _is_set(_GLUE_GRAPH):
        found.append(
            f"{_GLUE_GRAPH} (it replays one preparation for both variants of a decode graph)"
        )
    if found:
        raise ValueError(f"{asked} cannot be combined with: " + "; ".join(found))


def _found(args: ServerArgs, conflicts: Mapping[str, str]) -> list[str]:
    given = {field: getattr(args, field, None) for field in conflicts}
    return [
        f"--{field.replace('_', '-')} ({conflicts[field]})"
        for field, value in given.items()
        if value not in _UNSET and not (field.endswith("_size") and value <= 1)
    ]


def check_evicting(args: ServerArgs, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a policy evicts positions and a flag asks for attention that reads them."""
    if not config.evictions:
        return
    for flag, name in _backends(args):
        if name not in compat.EVICTION_BACKENDS:
            raise ValueError(reads_evicted(config, flag, name))


def check_selector(args: ServerArgs, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a policy selects what is read and a flag is in its way."""
    selector = config.policies.selector
    if selector is None:
        return
    check_selected_page(selector.name, args.page_size or 1)
    if config.apply == "copy":
        raise ValueError(
            f"{flag_of('policy')} {selector.name} knows pages by the keys that attention wrote; "
            f"{flag_of('apply')}=copy writes others"
        )
    for flag, name in _backends(args):
        if name not in compat.EVICTION_BACKENDS:
            raise ValueError(reads_everything(selector.name, flag, name))


def _backends(args: ServerArgs) -> list[tuple[str, str]]:
    """Flag and name of the attention backends that the operator chose."""
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [
        ("--" + field.replace("_", "-"), getattr(args, field))
        for field in fields
        if getattr(args, field, None) is not None
    ]


def check_selected_page(policy: str, page_size: int) -> None:
    """Raises ValueError where a page is no more than a position.

    Asked twice: for the flag, and for the page size SGLang resolved to.
    """
    if page_size < 2:
        raise ValueError(
            f"{flag_of('policy')} {policy} selects whole pages: --page-size must be at least 2 "
            f"(the paper has 16), got {page_size}"
        )


def reads_everything(policy: str, flag: str, name: str) -> str:
    return (
        f"{flag_of('policy')} {policy} selects what a step reads, which {flag} {name} does not "
        f"ask; use {', '.join(compat.EVICTION_BACKENDS)}, one for prefill and decode"
    )


def no_memory_for_bounds(policy: str, error: MemoryError) -> str:
    return (
        f"{flag_of('policy')} {policy} keeps the least and largest key of each page beside the "
        f"pool: {error}; lower --mem-fraction-static, or raise --page-size"
    )


def reads_evicted(config: ReasonCacheConfig, flag: str, name: str) -> str:
    return (
        f"{flag_of('policy')} {config.policy} evicts positions, which {flag} {name} would read; "
        f"use {', '.join(compat.EVICTION_BACKENDS)}, one for prefill and decode"
    )


def tells_no_weights(policy: str, flag: str, name: str) -> str:
    return (
        f"{flag_of('policy')} {policy} needs attention statistics, which {flag} {name} does not "
        f"give; use {' or '.join(compat.EVICTION_BACKENDS)}"
    )


def no_memory_for_weights(
    config: ReasonCacheConfig, wanted: StatisticsNeeds, error: MemoryError
) -> str:
    return (
        f"{flag_of('policy')} {config.policy} keeps the weights of the newest {wanted.latest} queries "
        f"(window of snapkv, alpha of rkv) apart: {error}; lower that, or --context-length"
    )


def _is_set(variable: str) -> bool:
    # The words that SGLang takes for true.
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")


def check_page_size(page_size: int) -> None:
    """Raises ValueError where SGLang's allocator debugging would trip over shared pages.

    Asked twice: for the flag, and for the page size SGLang resolved to.
    """
    if page_size > 1 and _is_set("SGLANG_DEBUG_MEMORY_POOL"):
        raise ValueError(
            "--enable-reasoncache cannot be combined with: SGLANG_DEBUG_MEMORY_POOL at page size "
            f"{page_size} (it counts a shared page as freed twice)"
        )
