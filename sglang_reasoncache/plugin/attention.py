# SPDX-License-Identifier: Apache-2.0
"""Makes a server's attention backend, and says which sharing and eviction features the backend supports."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention import absorbed, expanded, models, rotations, warm_up
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import ModelRunner, ServerArgs
from sglang_reasoncache.config import ReasonCacheConfig, flag_of
from sglang_reasoncache.cpu import attention as cpu_attention
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.recent_queries import RecentQueries
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.plugin import graph_votes, refusals
from sglang_reasoncache.selection.pages import PageSelection

logger = logging.getLogger(__name__)
_CORRECTED = f"{flag_of('positions')} corrected"
_AS_CACHED = (
    f"; {flag_of('positions')} as-cached shares all the same, which cost a language model 30 points of "
    "accuracy (docs/benchmarks.md)"
)
_PAGES = "--page-size above 1 with keys read as cached"


@dataclass(frozen=True)
class AttentionParts:
    """What an attention backend offers. *Corrected* keys are rotated to the positions where they are used."""

    #: Layer id -> rotation of the layer's keys. None if keys are not corrected.
    rotations: Mapping[int, KeyRotation] | None = None
    #: Whether prefills correct keys, too.
    corrects_prefills: bool = True
    #: Whether SGLang's kernels run prefills over shifted latent rows.
    expands: bool = False
    queries: RecentQueries | None = None  # None if no policy reads recent queries
    selection: PageSelection | None = None  # None if decode steps read everything
    serves_policies: bool = False
    uncorrected: str = ""  # why our backend cannot correct keys; "" if it can, or was not tried


#: The draft model's attention backend on a server whose own backend looks up pages. It serves all models.
_DRAFTS = "triton"
#: SGLang's ``--triton-attention-split-tile-size`` for latent attention of draft models. CUDA graphs have 2 KiB
#: per token and head for each such tile of the longest context: 40 tiles of 163,840 tokens. Without the flag
#: there are 256, tens of GiB.
_LATENT_TILE = 4096


def choose_draft_backend(server_args: ServerArgs, config: ReasonCacheConfig) -> None:
    """If the server's attention looks up pages, have a draft model look up single slots: a page of a row that
    shares may name slots of several pages. Called after SGLang has chosen the attention backend. Does nothing
    if the operator or SGLang's rules for the model name a draft backend."""
    resolved = compat.resolving_view(server_args)
    named = resolved.speculative_draft_attention_backend is not None
    if not config.shares or named or not refusals.has_draft_model(resolved):
        return
    if refusals.in_the_way_of_corrected(server_args) or _cannot_share(server_args):
        return  # nothing will be shared
    backends = set(compat.attention_backends_of(resolved))
    if len(backends) > 1:
        return  # nor between two backends at page sizes above 1
    target = backends & set(compat.PAGE_BACKENDS)
    if target and (resolved.page_size or 1) > 1:
        chosen: dict[str, Any] = {"speculative_draft_attention_backend": _DRAFTS}
        if "trtllm_mla" in target and resolved.triton_attention_split_tile_size is None:
            chosen["triton_attention_split_tile_size"] = _LATENT_TILE
        compat.declare_resolution(server_args, "sglang-reasoncache", **chosen)
        logger.info(
            "reasoncache: takes --speculative-draft-attention-backend %s, which looks up single slots; %s "
            "looks up pages",
            _DRAFTS,
            *target,
        )


def _cannot_share(server_args: ServerArgs) -> bool:
    """Whether the flags show that the KV pool will be one of those that cannot be shared
    (``plugin/unshared.py``)."""
    return "fp4" in (compat.resolving_view(server_args).kv_cache_dtype or "")


def attention_backend(
    model_runner: ModelRunner,
    config: ReasonCacheConfig,
    name: str,
    stock: Callable[[ModelRunner], Any],
    cached: CachedPositions,
) -> tuple[Any, AttentionParts]:
    """Make our backend if settings and server allow it, else the registered one (``stock``). ``cached``: where
    our backend records the position that each key is rotated for. ``name``: one of ``compat.OUR_BACKENDS``.
    Raises ValueError if a requested backend or policy is not supported, or if memory is missing."""
    restricts = config.policies.needs_our_attention
    if restricts and models.fallback_layers(model_runner.model):
        raise refusals.of_policy(
            config.policy,
            "does not support models that SGLang runs by Hugging Face's code (Transformers fallback)",
        )
    layers = models.attention_layers(model_runner) if restricts else ()
    if any(map(models.reach_of, layers)):
        raise refusals.of_policy(
            config.policy, "does not support sliding windows: layers read different positions"
        )
    backend, uncorrected = _our_backend(model_runner, config, name, cached)
    backend = stock(model_runner) if backend is None else backend
    paged: PagedAttention | None = getattr(backend, "paged", None)
    if paged is None:
        return backend, AttentionParts(uncorrected=uncorrected)
    if name not in compat.CUDA_BACKENDS:
        _select(paged, config)
    if model_runner.prefill_attention_backend_str != model_runner.decode_attention_backend_str:
        return backend, AttentionParts(rotations=paged.rotations, uncorrected=uncorrected)
    return backend, AttentionParts(
        rotations=paged.rotations,
        corrects_prefills=paged.runs_prefills,
        expands=paged.expands,
        queries=_queries(paged, config),
        selection=paged.selection,
        serves_policies=True,
        uncorrected=uncorrected,
    )


def _queries(paged: PagedAttention, config: ReasonCacheConfig) -> RecentQueries | None:
    """Have the backend keep recent queries if a policy reads them. Raises ValueError if memory is missing."""
    window = max((policy.queries for _, policy in config.policies.evictors), default=0)
    if not window:
        return None
    try:
        queries = paged.keep_queries(window)
    except MemoryError as error:
        raise refusals.of_policy(
            config.policy,
            f"keeps the newest queries of every request: {error}; lower --max-running-requests, or the "
            "policy's window, alpha or prompt_queries",
        ) from error
    logger.info(
        "reasoncache: the newest %d queries of %d requests take %.1f MiB",
        window,
        len(queries.positions),
        queries.nbytes / 2**20,
    )
    return queries


def _select(paged: PagedAttention, config: ReasonCacheConfig) -> None:
    """Have decode steps select what they read if a policy says so. Raises ValueError if memory is missing."""
    quest = config.policies.selector
    if quest is None:
        return
    try:
        selection = paged.select(quest)
    except MemoryError as error:
        raise refusals.of_policy(
            config.policy,
            f"keeps bounds of the keys of every page: {error}; lower --mem-fraction-static, or take a larger "
            "--page-size",
        ) from error
    logger.info("reasoncache: bounds of pages' keys take %.1f MiB", selection.nbytes / 2**20)


def resolve_positions(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> tuple[ReasonCacheConfig, str | None]:
    """Return ``config`` with ``positions=auto`` replaced by ``corrected``. If the backend cannot correct keys,
    ``auto`` becomes ``as-cached``, nothing is shared, and the reason is returned too. So it is if keys are read
    as cached at a page size above 1, and not by our kernels. Raises ValueError if the
    operator asked for ``corrected`` and the backend does not support this."""
    if _reads_pages(config, model_runner) and not parts.serves_policies:
        reason = parts.uncorrected or (
            f"{_PAGES} needs --attention-backend {', '.join(compat.OUR_BACKENDS)}, "
            f"this server runs {model_runner.decode_attention_backend_str}"
        )
        logger.warning("reasoncache: nothing is shared, because: %s", reason)
        return dataclasses.replace(config, percentile=0), reason
    if config.positions == "as-cached":
        if config.shares and (flags := refusals.deterministic(model_runner.server_args)):
            # The keys have no positions. With as-cached from the operator the server does not start.
            reason = "; ".join(flags)
            logger.warning("reasoncache: nothing is shared, because: %s", reason)
            return dataclasses.replace(config, percentile=0), reason
        return config, None
    if parts.rotations is not None:
        return dataclasses.replace(config, positions="corrected"), None
    reason = parts.uncorrected or _why_not(model_runner)
    if config.positions == "corrected":
        raise ValueError(f"{reason}; use as-cached with it")
    if config.shares:
        # Without a rotary embedding it is not known what reading keys as cached costs: perhaps nothing.
        with_kv = compat.layer_ids(model_runner.token_to_kv_pool)
        names_a_way = reason.endswith(models.IT_WORKS)
        unknown = rotations.finds_no_rotary(model_runner.model, with_kv)
        hint = "" if names_a_way or unknown else _AS_CACHED
        logger.warning("reasoncache: nothing is shared, because: %s%s", reason, hint)
    return dataclasses.replace(config, positions="as-cached", percentile=0), reason


def check_pool_for_policies(config: ReasonCacheConfig, pool: Any) -> None:
    """Raises ValueError if a policy evicts or selects and attention is latent (MLA), or if a policy selects
    pages of one position. Called before backends are built."""
    if compat.latent_rank(pool) and config.policies.needs_our_attention:
        raise refusals.of_policy(
            config.policy, "does not support latent attention: it scores keys and values of heads"
        )
    if config.policies.selector is not None and pool.page_size < 2:
        raise refusals.of_policy(
            config.policy,
            f"selects whole pages: --page-size must be at least 2 (the paper has 16), got {pool.page_size}",
        )


def check_policies(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> None:
    """Raises ValueError for a policy that this server's attention does not support."""
    decode = model_runner.decode_attention_backend_str
    names = " and ".join(sorted({model_runner.prefill_attention_backend_str, decode}))
    others = [] if parts.serves_policies else [f"--attention-backend {names}"]
    refusals.check_policies(config, others)
    for name, policy in config.policies.evictors:
        if policy.unrotates and config.positions != "corrected":
            raise refusals.of_policy(
                name,
                "needs unrotated keys, which takes --reasoncache-positions corrected, "
                f"got {config.positions}",
            )


def _why_not(model_runner: ModelRunner) -> str:
    """Why keys are not corrected, for a server on which none of our backends was tried."""
    conflicts = refusals.in_the_way_of_corrected(model_runner.server_args)
    if conflicts:
        return f"{_CORRECTED} cannot be combined with: {'; '.join(conflicts)}"
    return (
        f"{_CORRECTED} needs --attention-backend {', '.join(compat.OUR_BACKENDS)}, "
        f"this server runs {model_runner.decode_attention_backend_str}"
    )


def _our_backend(
    model_runner: ModelRunner, config: ReasonCacheConfig, name: str, cached: CachedPositions
) -> tuple[Any, str]:
    """Our backend (None: use ``stock``), and why it cannot correct keys ("" if it can or was not tried)."""
    reason = ""
    if config.positions != "as-cached":
        try:
            return _corrected(model_runner, name, cached, config), reason
        except ValueError as error:
            if config.positions == "corrected":
                raise
            reason = str(error)
            if error.__cause__ is not None:  # show the traceback of what failed
                logger.warning("reasoncache: %s", reason, exc_info=error)
        # SGLang's backend needs the memory that our unfinished backend held.
        gc.collect()
        torch.cuda.empty_cache()
    prefill = model_runner.prefill_attention_backend_str
    decode = model_runner.decode_attention_backend_str
    if name in compat.CUDA_BACKENDS and prefill == decode and config.policies.needs_our_attention:
        # Policies need our kernels. ``check_policies`` refuses policies if prefill and decode use two backends.
        requested_by = f"{flag_of('policy')} {config.policy}"
        return make_cuda(model_runner, name, None, config, requested_by=requested_by), reason
    if name in compat.CUDA_BACKENDS and prefill == decode and _reads_pages(config, model_runner):
        try:
            return make_cuda(model_runner, name, None, config, requested_by=_PAGES), reason
        except ValueError as error:
            reason = str(error)
    return None, reason


def _reads_pages(config: ReasonCacheConfig, model_runner: ModelRunner) -> bool:
    """Whether rows that share must be read by our kernels although no key is rotated: SGLang's may look up only
    the first slot of each page."""
    as_cached = config.shares and config.positions == "as-cached"
    return as_cached and model_runner.token_to_kv_pool.page_size > 1


def _corrected(
    model_runner: ModelRunner, name: str, cached: CachedPositions, config: ReasonCacheConfig
) -> Any:
    """Make our backend with corrected keys. Raises ValueError if it does not support this server."""
    prefill = model_runner.prefill_attention_backend_str
    decode = model_runner.decode_attention_backend_str
    if prefill != decode:
        # Our backend records a slot's position when it writes the slot. SGLang's backend does not.
        # SGLang chooses such a pair for Qwen3-VL on an H100, unless the operator names a backend.
        both = {prefill, decode} <= set(compat.CUDA_BACKENDS)
        hint = f"; with --attention-backend {prefill} {models.IT_WORKS}" if both else ""
        raise ValueError(
            f"{_CORRECTED} needs one attention backend for prefill and decode, got {prefill} and {decode}{hint}"
        )
    if name == compat.CPU_BACKEND:
        return cpu_attention.make(model_runner, cached)
    return make_cuda(model_runner, name, cached, config, requested_by=_CORRECTED)


def make_cuda(
    model_runner: ModelRunner,
    name: str,
    cached: CachedPositions | None,
    config: ReasonCacheConfig,
    *,
    requested_by: str,
) -> Any:
    """Makes the CUDA backend of a scheduler process. All tensor-parallel ranks call this together, and all get
    a backend or none does, because all must capture the same CUDA graphs.

    ``name``: one of ``compat.CUDA_BACKENDS``. ``cached``: records the position that each key is rotated for;
    None if keys are never corrected. ``requested_by``: the flag that asks for the backend; every message begins
    with this flag. Raises ValueError if the server is not supported, if there is too little GPU memory, or if
    this happened on another rank. If the error has a ``__cause__``, something failed: memory or a compiler is
    missing, or SGLang could not apply a hook.
    """
    requested_by = f"{requested_by} over --attention-backend {name}"
    ranks = all_ranks()
    try:
        try:
            backend = _ready_for_graphs(model_runner, name, cached, config, requested_by)
        except Exception:
            ranks.least(False)  # the other ranks wait for this rank's answer
            raise
        if not ranks.least(True):
            raise ValueError(
                f"{requested_by} is not possible on another tensor-parallel rank, whose log says why"
            )
        # Hooks are installed last, because they cannot be removed after a failure.
        graph_votes.install(backend)
        if backend.paged.latent:
            # SGLang's backend has no chunked prefills on the decode server of a PD pair.
            has_chunks = getattr(backend, "enable_chunk_kv", True)
            if has_chunks and absorbed.can_expand(model_runner, name):
                expanded.install()
                backend.paged.expands = True
            absorbed.where_ours(name)
    except ValueError:
        graph_votes.let_go()
        raise
    except Exception as error:
        graph_votes.let_go()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{requested_by} failed at the start: {reason}") from error
    return backend


def _ready_for_graphs(
    model_runner: ModelRunner,
    name: str,
    cached: CachedPositions | None,
    config: ReasonCacheConfig,
    requested_by: str,
) -> Any:
    """The backend that :func:`make_cuda` makes, with compiled kernels and memory for its graphs' plans."""
    if torch.device(model_runner.device).type != "cuda" or torch.version.hip is not None:
        device = f"{model_runner.device} (ROCm)" if torch.version.hip else model_runner.device
        raise ValueError(f"{requested_by} needs an NVIDIA GPU, this server runs on {device}")
    if name == "fa3" and torch.cuda.get_device_capability()[0] not in (8, 9):
        raise ValueError(f"{requested_by} needs a GPU of compute capability 8 or 9")
    refusals.refuse(requested_by, refusals.in_the_way_of_corrected(model_runner.server_args))
    latent = bool(compat.latent_rank(model_runner.token_to_kv_pool))
    kwargs = {}
    if name == "flashinfer" and not latent:
        # SGLang's registry passes this argument too.
        kwargs["init_new_workspace"] = model_runner.init_new_workspace
    made = backend_class(name, latent)
    backend = made(model_runner, cached, requested_by=requested_by, **kwargs)
    if cached is None and not backend.paged.runs_prefills:
        raise ValueError(
            f"{requested_by}: SGLang's kernels run the prefills of this model's latent attention"
        )
    if backend.paged.backend != "triton":
        raise ValueError(f"{requested_by} needs Triton kernels, which cannot be had here")
    _select(backend.paged, config)
    requests = compat.largest_decode_graph(model_runner)
    if requests:
        backend.reserve_plans(requests)
    warm_up.compile_attention(backend.paged, compat.drafted_tokens(model_runner))
    return backend


def all_ranks() -> Ranks:
    """All tensor-parallel ranks of this server, those of every DP-attention group included."""
    parallel = compat.get_parallel()
    return Ranks(parallel.tp_group.cpu_group if parallel.tp_size > 1 else None)


#: Name of one of ``compat.CUDA_BACKENDS``, and whether attention is latent -> SGLang's class.
STOCK = {
    ("flashinfer", False): "FlashInferAttnBackend",
    ("flashinfer", True): "FlashInferMLAAttnBackend",
    ("triton", False): "TritonAttnBackend",
    ("triton", True): "TritonAttnBackend",
    ("fa3", False): "FlashAttentionBackend",
    ("fa3", True): "FlashAttentionBackend",
    ("trtllm_mha", False): "TRTLLMHAAttnBackend",
    ("trtllm_mla", True): "TRTLLMMLABackend",
}


def backend_class(name: str, latent: bool = False) -> type:
    """Our subclass of SGLang's backend ``name``, for latent or ordinary attention. Raises ValueError if SGLang
    has no such backend, ImportError or AttributeError if SGLang's class is missing."""
    stock = STOCK.get((name, latent))
    if stock is None:
        kind = "latent" if latent else "ordinary"
        raise ValueError(f"--attention-backend {name} does not compute {kind} attention")
    bases = (SharedSlotReads, getattr(compat, stock))
    # ``unread``: SGLang's Triton decode kernels leave out the oldest position of a sliding window.
    members = {"__module__": __name__, "unread": int(name == "triton")}
    members["one_window"] = name in compat.SLOT_BACKENDS
    members["verifies_windows"] = name != "flashinfer"
    return type(f"Corrected{stock}", bases, members)
