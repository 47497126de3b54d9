# SPDX-License-Identifier: Apache-2.0
"""Has SGLang compute latent attention (MLA) in absorbed form where our kernels run it: queries then attend to
the latent rows of the pool. SGLang's own prefills often expand rows to keys and values of heads instead, which
our kernels do not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from sglang_reasoncache.compat.types import ModelRunner

#: SGLang's attention module, from which those of most models are made. It asks SGLang's registry, in each
#: forward, which form to compute.
ASKS = "DeepseekV2AttentionMLA"


def is_possible(model_runner: ModelRunner) -> bool:
    """Whether every latent layer of a model can be computed in absorbed form in any forward. Modules of
    lightning attention, which have no KV, do not count."""
    rank = compat.latent_rank(model_runner.token_to_kv_pool)
    with_kv = compat.layer_ids(model_runner.token_to_kv_pool)
    return all(
        _asks(owner) or all(_is_absorbed(layer, rank) for layer in layers)
        for owner in model_runner.model.modules()
        if (layers := [c for c in owner.children() if _has_kv(c, with_kv)])
    )


def _has_kv(module: torch.nn.Module, with_kv: Collection[int]) -> bool:
    return isinstance(module, compat.RadixAttention) and module.layer_id in with_kv


def _asks(owner: torch.nn.Module) -> bool:
    return ASKS in (base.__name__ for base in type(owner).__mro__)


def _is_absorbed(layer: Any, rank: int) -> bool:
    return bool(layer.v_head_dim == rank and layer.tp_k_head_num == 1)


def always(name: str) -> None:
    """Every forward of the attention backend ``name`` is absorbed."""
    absorbed = compat.AttnForwardMethod.MLA
    compat.AttentionBackendRegistry.register(name, lambda *_: absorbed)


def where_ours(name: str) -> None:
    """The prefills that our kernels run are absorbed. SGLang chooses the form of all other forwards of the
    attention backend ``name``. Idempotent."""
    stock = compat.AttentionBackendRegistry.get_handler(name)
    if not isinstance(stock, _WhereOurs):
        compat.AttentionBackendRegistry.register(name, _WhereOurs(stock))


class _WhereOurs:
    """Chooses the form of a layer's attention in a forward, as SGLang's function ``stock`` does."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, attention: Any, forward_batch: Any) -> Any:
        # The backend of this forward: a draft model has its own. A hybrid model has a second one for states.
        backend = compat.get_attn_backend()
        paged = getattr(getattr(backend, "full_attn_backend", backend), "paged", None)
        if paged is not None and paged.extend_plan is not None:
            return compat.AttnForwardMethod.MLA
        return self._stock(attention, forward_batch)
