# SPDX-License-Identifier: Apache-2.0
"""Matrix products in fp32 with weights that oneDNN packs once, on this project's CPU platform.

PyTorch hands them to MKL, which packs the weights again in each call; with some tens of rows that takes most of
the time of a decode step, on AMD's CPUs above all. Packed weights take as much memory again, so they are used
only if the variable ``ENV`` is set: evaluations of language models set it."""

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.compat.carriers import PACKED
from sglang_reasoncache.cpu.activate import PLATFORM_NAME

#: Set to 1, has servers on our CPU platform pack their weights.
ENV = "REASONCACHE_PACKED"
#: Weights with fewer elements, and products with a single row, stay with PyTorch: there packing gains nothing.
_LEAST = 1 << 17
#: How many rows packing is to suit. oneDNN multiplies any number of rows.
_ROWS = 48
#: How often weights were loaded into the model. SGLang's loaders write ``weight.data``, which leaves a weight's
#: version as it is.
_loads = 0


def install() -> None:
    """Hook SGLang's linear layers and its product with the vocabulary, if the variable is set."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME or os.environ.get(ENV) != "1":
        return
    targets = compat.CPU_HOOK_TARGETS
    for name, hook in (("linear", _around_linear), ("lm_head", _around_lm_head)):
        compat.HookRegistry.register(targets[name], hook, compat.HookType.AROUND)
    for name in compat.WEIGHT_HOOKS:
        compat.HookRegistry.register(compat.HOOK_TARGETS[name], after_load, compat.HookType.AFTER)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, fp32. ``x``: ``[..., k]``; ``weight``: ``[n, k]``; ``bias``: ``[n]`` or None."""
    current = weight._version, _loads
    version, packed = getattr(weight, PACKED, (None, None))
    if version != current:
        # The first product, or one after the weights were loaded anew in place.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        setattr(weight, PACKED, (current, packed))
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def suits(x: torch.Tensor, weight: Any) -> bool:
    """Whether :func:`product` is to compute the product."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.device.type == x.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() >= _LEAST
        and x.numel() > x.shape[-1]
    )


def after_load(_result: Any, *_: Any, **__: Any) -> None:
    """New weights were loaded."""
    global _loads
    _loads += 1


def _around_linear(
    stock: Callable[..., Any], method: Any, layer: Any, x: torch.Tensor, bias: Any = None
) -> Any:
    if suits(x, layer.weight):
        return product(x, layer.weight, bias)
    return stock(method, layer, x, bias)


def _around_lm_head(
    stock: Callable[..., Any],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    *more: Any,
    **named: Any,
) -> Any:
    plain = not hasattr(lm_head, "set_lora") and not any(
        each is not None for each in (*more, *named.values())
    )
    if plain and suits(hidden_states, getattr(lm_head, "weight", None)):
        return product(hidden_states, lm_head.weight, None)
    return stock(processor, hidden_states, lm_head, *more, **named)
