# SPDX-License-Identifier: Apache-2.0
"""What cannot run together with sharing, refused at start-up with flag and reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_reasoncache import compat
from sglang_reasoncache.config import ReasonCacheConfig, flag_of
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds


class Refusal(NamedTuple):
    """``applies(server_args)`` is true when ``flag`` is in the way for ``reason``."""

    flag: str
    applies: Callable[[Any], bool]
    reason: str


def _on(field: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, field, False))


def _above(field: str, bound: int) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, field, None) or 0) > bound


_OWN_TREE = "it brings its own prefix cache or KV tier, which does not count shared slots"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--radix-cache-backend",
        lambda args: args.radix_cache_backend not in (None, compat.TREE_BACKEND),
        "the prefix cache must be ours to count shared slots",
    ),
    Refusal("--enable-hierarchical-cache", _on("enable_hierarchical_cache"), _OWN_TREE),
    Refusal("--enable-lmcache", _on("enable_lmcache"), _OWN_TREE),
    Refusal("--enable-flexkv", _on("enable_flexkv"), _OWN_TREE),
    Refusal("--enable-hisparse", _on("enable_hisparse"), _OWN_TREE),
    Refusal(
        "--enable-unified-memory", _on("enable_unified_memory"), "its pool hands out virtual slots"
    ),
    Refusal(
        "--enable-unified-cache-external-linker",
        _on("enable_unified_cache_external_linker"),
        _OWN_TREE,
    ),
    Refusal(
        "--enable-streaming-session",
        _on("enable_streaming_session"),
        "a session keeps its row after the request",
    ),
    Refusal(
        "--enable-session-radix-cache",
        _on("enable_session_radix_cache"),
        "a session keeps its row after the request",
    ),
    Refusal(
        "--speculative-algorithm",
        _on("speculative_algorithm"),
        "a draft may rewrite positions that are already shared",
    ),
    Refusal(
        "--disaggregation-mode",
        lambda args: getattr(args, "disaggregation_mode", "null") not in (None, "null"),
        "transfers address slots by row and would send a shared one twice",
    ),
    Refusal(
        "--kv-canary",
        lambda args: getattr(args, "kv_canary", "none") not in (None, "none", False),
        "a canary marks slots we may free",
    ),
    Refusal(
        "--enable-return-routed-experts",
        _on("enable_return_routed_experts"),
        "experts are recorded by slot",
    ),
    Refusal(
        "--enable-return-indexer-topk",
        _on("enable_return_indexer_topk"),
        "indices are recorded by slot",
    ),
    Refusal(
        "--prefill-only-disable-kv-cache",
        _on("prefill_only_disable_kv_cache"),
        "there is no KV cache to share",
    ),
    Refusal("--skip-tokenizer-init", _on("skip_tokenizer_init"), "steps are found in text"),
    Refusal(
        "--strip-thinking-cache",
        _on("strip_thinking_cache"),
        "it releases output slots outside the prefix cache",
    ),
    Refusal("--dcp-size", _above("dcp_size", 1), "a slot is spread over ranks"),
    Refusal("--pp-size", _above("pp_size", 1), "the distance needs every layer on one rank"),
    Refusal("--dllm-algorithm", _on("dllm_algorithm"), "a diffusion model rewrites its KV"),
    Refusal(
        "--enable-dp-attention",
        _on("enable_dp_attention"),
        "ranks would have to agree on decisions; not tested",
    ),
    Refusal(
        "--attn-dp-size",
        _above("attn_dp_size", 1),
        "ranks would have to agree on decisions; not tested",
    ),
    Refusal("--attn-cp-size", _above("attn_cp_size", 1), "a request is spread over ranks"),
    Refusal("--use-ray", _on("use_ray"), "plugins are not tested under Ray"),
)


def check(args: Any) -> None:
    """Raises ValueError naming every flag in the way. ``args``: raw ``ServerArgs``."""
    found = [f"{r.flag} ({r.reason})" for r in REFUSALS if r.applies(args)]
    if found:
        raise ValueError("--enable-reasoncache cannot be combined with: " + "; ".join(found))
    check_page_size(args.page_size or 1)


def check_evicting(args: Any, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a policy evicts positions and a flag asks for attention that reads them."""
    if not config.evictions:
        return
    for flag, name in _backends(args):
        if name not in compat.EVICTION_BACKENDS:
            raise ValueError(reads_evicted(config, flag, name))


def check_selector(args: Any, config: ReasonCacheConfig) -> None:
    """Raises ValueError where a policy selects what is read and a flag is in its way."""
    selector = config.policies.selector
    if selector is None:
        return
    check_selected_page(selector.name, args.page_size or 1)
    if config.apply == "copy":
        raise ValueError(
            f"{flag_of('policy')} {selector.name} knows pages by the keys that attention wrote; "
            f"{flag_of('apply')} copy writes others"
        )
    for flag, name in _backends(args):
        if name not in compat.EVICTION_BACKENDS:
            raise ValueError(reads_everything(selector.name, flag, name))


def _backends(args: Any) -> list[tuple[str, str]]:
    """Flag and name of the attention backends that the operator chose."""
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [
        ("--" + field.replace("_", "-"), getattr(args, field))
        for field in fields
        if getattr(args, field, None) is not None
    ]


def check_selected_page(policy: str, page_size: int) -> None:
    """Raises ValueError where a page is no more than a position.

    Asked twice: for the flag, and for the page size SGLang settled on.
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


#: In the way of corrected positions on CUDA only; as-cached runs SGLang's backends as they are.
CORRECTED_REFUSALS: tuple[Refusal, ...] = (
    Refusal("--enable-pdmux", _on("enable_pdmux"), "it makes one attention backend a stream"),
    Refusal(
        "--enable-two-batch-overlap",
        _on("enable_two_batch_overlap"),
        "it cuts a batch between two attention backends",
    ),
    Refusal("--enable-mis", _on("enable_mis"), "its positions are not those of the row"),
    Refusal("--enable-torch-compile", _on("enable_torch_compile"), "our kernels would be traced"),
    Refusal(
        "--enable-deterministic-inference",
        _on("enable_deterministic_inference"),
        "a batch decides which kernel reads its requests",
    ),
    Refusal(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        lambda _args: _is_set("SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        "it replays one preparation for both variants of a decode graph",
    ),
)


def check_corrected(args: Any, asked: str) -> None:
    """Raises ValueError naming every flag in the way of corrected positions on CUDA.

    ``args``: raw ``ServerArgs``. ``asked``: the beginning of the message.
    """
    found = [f"{r.flag} ({r.reason})" for r in CORRECTED_REFUSALS if r.applies(args)]
    if found:
        raise ValueError(f"{asked} cannot be combined with: " + "; ".join(found))


def _is_set(variable: str) -> bool:
    # The words that SGLang takes for true.
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")


def check_page_size(page_size: int) -> None:
    """Raises ValueError where SGLang's allocator debugging would trip over shared pages.

    Asked twice: for the flag, and for the page size SGLang settled on.
    """
    if page_size > 1 and _is_set("SGLANG_DEBUG_MEMORY_POOL"):
        raise ValueError(
            "--enable-reasoncache cannot be combined with: SGLANG_DEBUG_MEMORY_POOL at page size "
            f"{page_size} (it counts a shared page as freed twice)"
        )
