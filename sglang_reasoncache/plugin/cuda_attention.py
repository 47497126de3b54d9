# SPDX-License-Identifier: Apache-2.0
"""Our attention over ``--attention-backend flashinfer`` and ``triton`` on CUDA.

Two hooks come with it and are on no other server: one reads from the prefix tree of every batch
whether it reads shifted slots or evicted positions, one gives decode graphs two variants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat import hooking
from sglang_reasoncache.compat.types import ModelRunner
from sglang_reasoncache.plugin import refusals

#: The backend of this scheduler process.
_backend: Any | None = None


def make(
    model_runner: ModelRunner, name: str, cached: CachedPositions | None, *, requested_by: str
) -> Any:
    """The backend of a scheduler process.

    ``name``: one of ``compat.CUDA_BACKENDS``. ``cached``: None reads every key as cached.
    ``requested_by``: the flag that does, the beginning of every message. Raises ValueError for
    what is not supported, by name, RuntimeError where SGLang could not apply a hook.
    """
    global _backend
    requested_by = f"{requested_by} over --attention-backend {name}"
    if torch.device(model_runner.device).type != "cuda" or torch.version.hip is not None:
        device = f"{model_runner.device} (ROCm)" if torch.version.hip else model_runner.device
        raise ValueError(f"{requested_by} needs an NVIDIA GPU, this server runs on {device}")
    refusals.check_corrected(model_runner.server_args, requested_by)
    kwargs = {}
    if name == "flashinfer":
        # As SGLang's registry does.
        kwargs["init_new_workspace"] = model_runner.init_new_workspace
    backend = backend_class(name)(model_runner, cached, requested_by=requested_by, **kwargs)
    if backend.paged.backend != "triton":
        raise ValueError(f"{requested_by} needs Triton kernels, which cannot be had here")
    backend.paged.warm_up()
    _install_hooks()
    _backend = backend
    return backend


def backend_class(name: str) -> type:
    """Our class over SGLang's backend ``name``. Raises ImportError where SGLang's is missing."""
    from sglang_reasoncache.attention.paged_cuda import SharedSlotReads

    stock = {"flashinfer": "FlashInferAttnBackend", "triton": "TritonAttnBackend"}[name]
    bases = (SharedSlotReads, getattr(compat, stock))
    return type(f"Corrected{stock}", bases, {"__module__": __name__})


def _install_hooks() -> None:
    batch, variants = (compat.CUDA_HOOK_TARGETS[key] for key in ("forward_batch", "graph_variants"))
    hooking.apply(
        {
            batch: (_after_forward_batch, compat.HookType.AFTER),
            variants: (_around_graph_variants, compat.HookType.AROUND),
        }
    )


def _after_forward_batch(
    result: Any, _cls: type, batch: Any, model_runner: ModelRunner, **_kwargs: Any
) -> None:
    """Batches without our tree (SGLang's own trial runs) stay unknown."""
    tree = batch.tree_cache
    if _backend is None or model_runner.is_draft_worker or not hasattr(tree, "reads_shifted"):
        return
    # SGLang builds a batch on the stream that its forward runs on.
    shifted = _backend.mark.corrected and tree.reads_shifted(batch.reqs)
    _backend.mark.note(result.rids, shifted or tree.reads_evicted(batch.reqs))
    statistics, mode = _backend.paged.statistics, result.forward_mode
    if statistics is not None and not mode.is_idle():
        new = None if mode.is_decode() else result.extend_seq_lens_cpu
        prefill = statistics.begin(batch.req_pool_indices_cpu, batch.seq_lens_cpu, new)
        if prefill is not None:
            _backend.expect(result.rids, prefill)


def _around_graph_variants(original: Callable[[Any], Any], hf_config: Any) -> Any:
    variants = original(hf_config)
    if _backend is None:
        return variants
    if variants is not None:
        raise ValueError(
            f"{_backend.requested_by}: this model's decode graphs have variants of their own "
            f"({', '.join(variants.capture_labels)})"
        )
    from sglang_reasoncache.attention.paged_cuda import GraphVariants

    return GraphVariants(_backend)
