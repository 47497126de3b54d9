# SPDX-License-Identifier: Apache-2.0
"""Has SGLang compute latent attention (MLA) in absorbed form where our kernels run it: queries then attend to
the latent rows of the pool. SGLang's own prefills often expand rows to keys and values of heads instead, which
our kernels do not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.attention import expanded
from sglang_reasoncache.attention.models import attention_of, is_absorbed, owners_of

if TYPE_CHECKING:
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
        _asks(owner) or all(is_absorbed(layer, rank) for layer in attention_of(owner, with_kv))
        for _, owner in owners_of(model_runner.model, with_kv)
    )


def can_expand(model_runner: ModelRunner, name: str) -> bool:
    """Whether SGLang can expand the prefills of every latent layer over the attention backend ``name``: each
    asks its registry, and neither ``--disable-chunked-prefix-cache`` nor ``--flashinfer-mla-disable-ragged``
    forbids it."""
    with_kv = compat.layer_ids(model_runner.token_to_kv_pool)
    forbids = ["disable_chunked_prefix_cache"]
    if name == "flashinfer":
        forbids.append("flashinfer_mla_disable_ragged")
    return name in expanded.BACKENDS and all(
        _asks(owner) and not any(getattr(owner, flag, True) for flag in forbids)
        for _, owner in owners_of(model_runner.model, with_kv)
    )


def _asks(owner: torch.nn.Module) -> bool:
    return ASKS in (base.__name__ for base in type(owner).__mro__)


def always(name: str) -> None:
    """Every forward of the attention backend ``name`` is absorbed."""
    absorbed = compat.AttnForwardMethod.MLA
    compat.AttentionBackendRegistry.register(name, lambda *_: absorbed)


def where_ours(name: str) -> None:
    """Prefills over shifted slots are expanded if SGLang can fetch what they read (``expanded.py``), otherwise
    absorbed, in our kernels. SGLang chooses the form of all other forwards of the attention backend ``name``.
    Idempotent."""
    stock = compat.AttentionBackendRegistry.get_handler(name)
    if not isinstance(stock, _WhereOurs):
        compat.AttentionBackendRegistry.register(name, _WhereOurs(stock))


class _WhereOurs:
    """Chooses the form of a layer's attention in a forward, as SGLang's function ``stock`` does."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, attention: Any, forward_batch: Any) -> Any:
        paged = expanded.running()
        if paged is None or paged.extend_plan is None:
            return self._stock(attention, forward_batch)
        if paged.expands:
            form = expanded.form_of(self._stock, paged, attention, forward_batch)
            if form in expanded.FORMS:
                return form
        return compat.AttnForwardMethod.MLA
