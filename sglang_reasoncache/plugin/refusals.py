# SPDX-License-Identifier: Apache-2.0
"""At start-up, refuses flags, settings and environment variables that cannot be combined, and says why."""

import os
from collections.abc import Mapping, Sequence

from sglang_reasoncache import compat
from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.attention import models, verification
from sglang_reasoncache.compat.types import ServerArgs
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.errors import CannotShare

_OWN_TREE = "it brings its own prefix cache or KV tier, which does not count shared slots"
_NO_HOOKS = "it parses requests where plugins have no hooks"
_OWN_READS = "it reads what the stock backend prepares, which ours skips"
_OWN_ROW = "a session keeps its row after the request"
#: Why nothing is shared where inference must be deterministic.
DEPENDS = "what a request reads depends on other requests"

#: Field of SGLang's ServerArgs that excludes this plugin when set (a size: when above 1) -> reason.
CONFLICTS: Mapping[str, str] = {
    "radix_cache_backend": "the prefix cache must be ours to count shared slots",
    "hicache_host_memory_mode": "it loads into slots of a request, not of the prefix cache",
    "enable_lmcache": _OWN_TREE,
    "enable_flexkv": _OWN_TREE,
    "enable_hisparse": _OWN_TREE,
    "enable_int8_mamba_checkpoint": "SGLang has it only with its own prefix cache",
    "elastic_ep_backend": "a rank that has left must get no request with documents",
    "enable_unified_memory": "its pool hands out virtual slots",
    "enable_unified_cache_external_linker": _OWN_TREE,
    "enable_streaming_session": _OWN_ROW,
    "enable_session_radix_cache": _OWN_ROW,
    "kv_canary": "a canary marks slots we may free",
    "enable_return_routed_experts": "experts are recorded by slot",
    "enable_return_indexer_topk": "indices are recorded by slot",
    "prefill_only_disable_kv_cache": "there is no KV cache to share",
    "strip_thinking_cache": "it releases output slots outside the prefix cache",
    "dcp_size": "a slot is spread over ranks",
    "pp_size": "the distance needs every layer on one rank",
    "dllm_algorithm": "a diffusion model rewrites its KV",
    "attn_cp_size": "a request is spread over ranks",
    "enable_prefill_cp": "a request is spread over ranks",
    "smg_grpc_mode": _NO_HOOKS,
    "grpc_mode": _NO_HOOKS,
    "grpc_port": _NO_HOOKS,
    "use_ray": "plugins are not tested under Ray",
}
#: Values of --speculative-algorithm that this plugin supports, in upper case.
SPECULATION = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
#: Those of them for which a prefill server of SGLang hands over what the first draft needs.
PD_SPECULATION = ("EAGLE", "EAGLE3", "NEXTN")
#: Fields that exclude this plugin with speculation -> reason.
SPECULATION_CONFLICTS: Mapping[str, str] = {
    "speculative_adaptive": "it makes a second attention backend while requests run",
    "enable_mixed_chunk": "its batches with speculation are not tested",
    "enable_lora": "adapters are not tested with speculation",
}
#: Fields that exclude this plugin on the decode server of a PD pair -> reason.
DECODE_CONFLICTS: Mapping[str, str] = {
    "disaggregation_decode_enable_offload_kvcache": "it would store approximate KV under exact keys",
    "enable_pd_role_switch": "the plugin does not prefill for another server",
    "enable_hierarchical_cache": "a host tier on a decode server is not tested",
}
#: ServerArgs field that excludes *corrected* keys (rotated to the position that reads them) on CUDA -> reason.
CORRECTED_CONFLICTS: Mapping[str, str] = {
    "enable_pdmux": "it makes one attention backend a stream",
    "enable_two_batch_overlap": "it cuts a batch between two attention backends",
    "enable_mis": "its positions are not those of the row",
    "enable_torch_compile": "our kernels would be traced",
    "enable_nvidia_megakernel": _OWN_READS,
    "enable_amd_monokernel": _OWN_READS,
    "enable_deterministic_inference": DEPENDS,
}
#: Environment variable that excludes corrected keys on CUDA when set -> reason. SGLang itself sets the second
#: variable for some models, and the third with ``--dwdp-size``.
CORRECTED_VARIABLES: Mapping[str, str] = {
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (
        "it replays one preparation for both variants of a decode graph"
    ),
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (
        "once graphs are captured it gives the KV pool the memory in which our prefills run"
    ),
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER": (
        "groups of DP attention would not agree which graph they run"
    ),
}
#: Environment variable that starts SGLang's server in Rust.
_RUST_SERVER = "SGLANG_RUST_SERVER"
#: Environment variable with the port of SGLang's gRPC server, which runs beside HTTP.
_GRPC_PORT = "SGLANG_GRPC_PORT"
#: Values that mean that a field is not set.
_UNSET = (None, False, "", "null", "none", "cache", compat.TREE_BACKEND)


def of_policy(policy: str, reason: str) -> ValueError:
    """The error that refuses ``policy``. Its message: ``--reasoncache-policy``, ``policy`` and ``reason``."""
    return ValueError(f"{flag_of('policy')} {policy} {reason}")


def check(args: ServerArgs) -> None:
    """Raises ValueError if flags exclude this plugin, and names all of them. ``args``: raw ``ServerArgs``."""
    conflicts = [*_conflicting(args, CONFLICTS), *_in_pd(args)]
    algorithm = compat.speculation(args)
    if algorithm is not None:
        conflicts += _in_speculation(args, algorithm, args.page_size or 1)
    if _is_set(_RUST_SERVER):
        conflicts.append(f"{_RUST_SERVER} ({_NO_HOOKS})")
    if os.environ.get(_GRPC_PORT):
        conflicts.append(f"{_GRPC_PORT} ({_NO_HOOKS})")
    refuse("--enable-reasoncache", conflicts)
    check_page_size(args.page_size or 1)


def _in_pd(args: ServerArgs) -> list[str]:
    """The flags of a server in a PD pair that exclude this plugin, with reasons."""
    if args.disaggregation_mode == "prefill":
        return [
            "--disaggregation-mode prefill (the decode server shares: give the flag to that one)"
        ]
    if args.disaggregation_mode != "decode":
        return []
    host = "--disaggregation-decode-host-receive-threshold below 1"
    receives = args.disaggregation_decode_host_receive_threshold < 1
    why = "prompts would reach the host before the pool"
    return [*_conflicting(args, DECODE_CONFLICTS), *([f"{host} ({why})"] * receives)]


def has_draft_model(args: ServerArgs) -> bool:
    """Whether a draft model, or draft layers, propose tokens and have KV of their own for each slot."""
    algorithm = compat.speculation(args)
    return algorithm is not None and algorithm.upper() != "NGRAM"


def _in_speculation(args: ServerArgs, algorithm: str, page_size: int) -> list[str]:
    """The flags of a server that speculates by ``algorithm`` and exclude this plugin, with reasons."""
    conflicts = _conflicting(args, SPECULATION_CONFLICTS)
    if args.lora_paths and args.enable_lora is None:
        # SGLang switches adapters on later.
        conflicts.append(f"--lora-paths ({SPECULATION_CONFLICTS['enable_lora']})")
    if algorithm.upper() not in SPECULATION:
        supported = ", ".join(SPECULATION)
        conflicts.append(f"--speculative-algorithm {algorithm} ({supported} are supported)")
    if args.moe_a2a_backend in models.DECODES_AS_PREFILLS:
        conflicts.append(f"--moe-a2a-backend {args.moe_a2a_backend} with speculation (untested)")
    if algorithm.upper() == "NGRAM" and (
        args.moe_a2a_backend not in _UNSET or args.moe_dense_tp_size
    ):
        conflicts.append(
            "--speculative-algorithm NGRAM with --moe-a2a-backend or --moe-dense-tp-size (nothing would be "
            "looked at while requests have a grammar)"
        )
    if page_size > 1 and (args.speculative_eagle_topk or 1) > 1:
        conflicts.append(
            f"--page-size {page_size} with trees of drafted tokens (only chains are tested)"
        )
    draft_backend = args.speculative_draft_attention_backend
    if page_size > 1 and draft_backend not in (None, compat.CPU_BACKEND, *compat.SLOT_BACKENDS):
        conflicts.append(
            f"--speculative-draft-attention-backend {draft_backend} at page size {page_size} (only "
            f"{', '.join(compat.SLOT_BACKENDS)} look up single slots)"
        )
    if has_draft_model(args) and (args.speculative_eagle_topk or 1) > 1:
        topk = f"--speculative-eagle-topk {args.speculative_eagle_topk}"
        conflicts.append(f"{topk} (only chains, 1, are tested)")
    if (args.speculative_num_draft_tokens or 0) > verification.MOST:
        drafted = f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens}"
        conflicts.append(f"{drafted} (at most {verification.MOST})")
    if args.disaggregation_mode == "decode" and algorithm.upper() not in PD_SPECULATION:
        drafts = f"--speculative-algorithm {algorithm} with --disaggregation-mode decode"
        conflicts.append(f"{drafts} (SGLang hands over what {', '.join(PD_SPECULATION)} need)")
    if _is_set("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        conflicts.append(
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM (plans of our kernels are in the graph)"
        )
    return conflicts


def check_settled_speculation(args: ServerArgs) -> None:
    """Raises CannotShare if what SGLang has settled for speculation excludes sharing, though the operator's
    flags do not: SGLang chooses another algorithm for some models (``FROZEN_KV_MTP`` for Gemma 4's
    assistants), or other flags."""
    settled = compat.resolving_view(args)
    algorithm = compat.speculation(settled)
    if algorithm is not None:
        conflicts = _in_speculation(settled, algorithm, settled.page_size or 1)
        if conflicts:
            raise CannotShare("SGLang has chosen " + "; ".join(conflicts))


def in_the_way_of_corrected(args: ServerArgs) -> list[str]:
    """The flags and variables in use that exclude corrected keys on CUDA, with reasons. SGLang may set some."""
    flags = _conflicting(compat.resolving_view(args), CORRECTED_CONFLICTS)
    variables = [name for name in CORRECTED_VARIABLES if _is_set(name)]
    return [*flags, *(f"{name} ({CORRECTED_VARIABLES[name]})" for name in variables)]


def _conflicting(args: ServerArgs, conflicts: Mapping[str, str]) -> list[str]:
    given = {field: getattr(args, field, None) for field in conflicts}
    return [
        f"{_option(field)} ({conflicts[field]})"
        for field, value in given.items()
        if value not in _UNSET and not (field.endswith("_size") and value <= 1)
    ]


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def refuse(subject: str, conflicts: list[str]) -> None:
    """Raises ValueError if ``conflicts`` lists anything that ``subject`` excludes. The message names both."""
    if conflicts:
        raise ValueError(f"{subject} cannot be combined with: {'; '.join(conflicts)}")


def other_attention(args: ServerArgs) -> list[str]:
    """Flags that choose an attention backend without support for policies, each with its backend."""
    given = {field: getattr(args, field, None) for field in compat.ATTENTION_FIELDS}
    served = (None, *compat.OUR_BACKENDS)
    return [f"{_option(field)} {name}" for field, name in given.items() if name not in served]


def check_policies(config: ReasonCacheConfig, others: Sequence[str]) -> None:
    """Raises ValueError if a policy evicts or selects positions and ``others`` is not empty. ``others``: flags,
    each with the name of an attention backend that would read all positions."""
    if others and config.policies.needs_our_attention:
        use = f"use {', '.join(compat.OUR_BACKENDS)}, one for prefill and decode"
        does = "evicts" if config.policies.evictors else "leaves out"
        raise of_policy(config.policy, f"{does} positions, which {others[0]} would read; {use}")


def check_where_policies_act(config: ReasonCacheConfig, args: ServerArgs) -> None:
    """Raises ValueError if a policy evicts or selects positions on the decode server of a PD pair, where SGLang
    copies the KV of all positions of a request that it retracts, and where no forward computes bounds of the
    keys that arrive. So does it with speculation, where a request has several queries a step."""
    if not config.policies.needs_our_attention:
        return
    evicts = bool(config.policies.evictors)
    if args.disaggregation_mode == "decode":
        reason = (
            "evicts positions, which a retraction would copy"
            if evicts
            else "selects by bounds of keys, which no forward computes where another server prefills"
        )
        raise of_policy(config.policy, f"{reason}; use it without --disaggregation-mode decode")
    if compat.speculation(args) is not None:
        reason = "evicts" if evicts else "selects"
        raise of_policy(
            config.policy,
            f"{reason} positions by the queries of decode steps; use it without --speculative-algorithm",
        )


def check_deterministic(config: ReasonCacheConfig, args: ServerArgs) -> None:
    """Raises ValueError for ``--enable-deterministic-inference`` if blocks share keys as cached, which any
    backend reads: which blocks share depends on other requests. Where keys would be corrected, nothing is
    shared with that flag (:data:`CORRECTED_CONFLICTS`)."""
    if not config.shares or config.positions != "as-cached":
        return
    refuse(f"{flag_of('positions')} as-cached", deterministic(args))


def deterministic(args: ServerArgs) -> list[str]:
    """The flags with which a request may not read what depends on other requests, with the reason."""
    # SGLang switches the first on for the second.
    given = {
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--rl-on-policy-target": args.rl_on_policy_target is not None,
    }
    return [f"{flag} ({DEPENDS})" for flag, is_given in given.items() if is_given]


def check_page_size(page_size: int) -> None:
    """Raises ValueError if SGLang's allocator debugging would take a shared page for an error."""
    variable = "SGLANG_DEBUG_MEMORY_POOL"
    if page_size > 1 and _is_set(variable):
        reason = f"at page size {page_size} (it counts a shared page as freed twice)"
        refuse("--enable-reasoncache", [f"{variable} {reason}"])


def _is_set(variable: str) -> bool:
    # SGLang's ``EnvBool`` reads these words as true.
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")
