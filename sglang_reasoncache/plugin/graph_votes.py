# SPDX-License-Identifier: Apache-2.0
"""The hooks of our CUDA backends. They mark whether a batch needs our kernels, give SGLang two decode graphs
for each batch size, and let the groups of DP attention vote on the graph that all of them run next."""

from collections.abc import Callable
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.attention.batch_mark import MarkedRids
from sglang_reasoncache.attention.paged_cuda import GraphVariants, GraphVote, SharedSlotReads
from sglang_reasoncache.cache.owner import NO_OWNER, SlotOwner
from sglang_reasoncache.compat.types import ModelRunner

#: Column of ``can_run_decode_cuda_graph`` in the table that the groups of DP attention exchange.
_DECODE_VOTE = 2
#: The ``SharedSlotReads`` of this scheduler. Without one the hooks leave SGLang as it is.
_backend: Any = None


def install(backend: Any) -> None:
    """Install the hooks in SGLang, for good. ``backend``: this scheduler's ``SharedSlotReads``. Raises
    RuntimeError if SGLang could not apply a hook."""
    global _backend
    _backend = backend
    after: dict[str, Callable[..., Any]] = {
        "forward_batch": _after_forward_batch,
        "decode_vote": _asking(_after_decode_vote),
        "prefill_vote": _asking(_after_prefill_vote),
        "votes": _after_votes,
    }
    hooks: dict[str, tuple[Callable[..., Any], Any]] = {
        compat.CUDA_HOOK_TARGETS[name]: (hook, compat.HookType.AFTER)
        for name, hook in after.items()
    }
    hooks[compat.CUDA_HOOK_TARGETS["graph_variants"]] = (
        _around_graph_variants,
        compat.HookType.AROUND,
    )
    hooks[compat.CUDA_HOOK_TARGETS["load_batch"]] = (
        _asking(_before_load_batch),
        compat.HookType.BEFORE,
    )
    compat.apply_hooks(hooks)


def let_go() -> None:
    """Have the hooks leave SGLang as it is, because the server goes on without our backend."""
    global _backend
    _backend = None


def _asking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` with the backend as first argument. Without a backend it changes nothing."""

    def asking(*args: Any, **named: Any) -> Any:
        return None if _backend is None else hook(_backend, *args, **named)

    return asking


def _after_forward_batch(
    result: Any, _cls: type, batch: Any, model_runner: ModelRunner, **_kwargs: Any
) -> None:
    """Mark in ``result.rids`` whether a new batch needs our kernels. Skip SGLang's own trial runs, which have
    no prefix tree of ours, and batches of a draft worker, which runs SGLang's backend."""
    tree: Any = getattr(batch, "tree_cache", None)
    backend: Any = getattr(model_runner, "attn_backend", None)
    # A hybrid model has two backends. Take the backend of its attention layers.
    backend = getattr(backend, "full_attn_backend", backend)
    if not isinstance(backend, SharedSlotReads) or not hasattr(tree, "reads_shifted"):
        return
    # SGLang builds the forward now, so polls, which ``_needs_ours`` stopped, may change block tables again.
    # A rank that failed here alone would replay another graph than the others.
    with tree.owner.contained_alone():
        tree.owner.hold_polls(False)
        result.rids = _marked(backend, batch, result.rids)
        if result.seq_lens_cpu is None:
            # With speculation only the device may know how many tokens were accepted.
            slots = [req.kv.kv_allocated_len for req in batch.reqs]
            # A request that ended since the batch was made is still read, as far as nobody knows here.
            result.rids.slots = sum(slots) if all(slots) else None


def _marked(backend: Any, batch: Any, rids: list[str]) -> MarkedRids:
    tree = batch.tree_cache
    evicted = tree.evicted_of(batch.reqs)
    shared = backend.paged.reads_shared and tree.reads_shifted(batch.reqs)
    return MarkedRids(rids, shared or evicted is None or any(evicted), evicted)


def _needs_ours(backend: Any, batch: Any) -> bool:
    """Whether a scheduled batch needs our kernels. ``batch``: None if this DP attention group has no batch.
    Also stops the controller's polls until SGLang builds the forward, because polls could change the answer."""
    if batch is None or not hasattr(batch.tree_cache, "reads_shifted"):
        return False
    owner: SlotOwner = batch.tree_cache.owner
    owner.hold_polls(True)
    needed = True
    with owner.contained():
        needed = _marked(backend, batch, []).needs_ours
    return needed


def _after_decode_vote(
    backend: Any, result: bool, *, local_batch: Any, **_: Any
) -> GraphVote | None:
    """This DP attention group's vote on the next decode graph. The smallest vote decides for all groups."""
    needed = _needs_ours(backend, local_batch)
    if not result:
        return None
    return GraphVote.SHIFTED if needed else GraphVote.PLAIN


def _after_prefill_vote(backend: Any, result: bool, *, local_batch: Any, **_: Any) -> bool | None:
    """Veto a prefill graph for all groups if this group's ``can_run_prefill_cuda_graph`` may refuse the graph.
    Decode steps vote too, because SGLang may run them as prefills while another group prefills."""
    if not result or local_batch is None or local_batch.forward_mode.is_idle():
        return None
    if backend.never_in_prefill_graphs or _needs_ours(backend, local_batch):
        return False
    tree = local_batch.tree_cache
    owner: SlotOwner = getattr(tree, "owner", NO_OWNER)
    # Veto if policies may evict positions of a prompt between vote and forward, or if a request may end between
    # them whose evicted positions are then unknown (``evicted_of``).
    ends = compat.envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get()
    unknown = ends and owner is not NO_OWNER and tree.token_to_kv_pool_allocator.has_evicted
    return False if owner.evicts_prompts or unknown else None


def _after_votes(_result: None, info: Any, *_: Any, **__: Any) -> None:
    """SGLang has turned the smallest decode vote into a bool. Restore the vote from ``info.tp0_info_cpu``
    ``[groups, columns]``. The batch carries this vote to ``SharedSlotReads.choose_graph``."""
    if _backend is None:
        return
    votes = info.tp0_info_cpu[:, _DECODE_VOTE]
    info.can_run_decode_cuda_graph = GraphVote(int(votes.min()))


def _before_load_batch(
    backend: SharedSlotReads, _runner: Any, forward_batch: Any, *_: Any, **__: Any
) -> None:
    """Choose the decode graph before SGLang prepares its replay. SGLang asks for the choice (``select``) before
    or after that, depending on its version."""
    backend.choose_graph(forward_batch)


def _around_graph_variants(original: Callable[[Any], Any], hf_config: Any) -> Any:
    variants = original(hf_config)
    if _backend is None:
        return variants
    if variants is not None:
        raise ValueError(
            f"{_backend.requested_by}: this model's decode graphs have variants of their own "
            f"({', '.join(variants.capture_labels)})"
        )
    return GraphVariants(_backend)
