# SPDX-License-Identifier: Apache-2.0
"""Hooks of a server that runs with ``--enable-reasoncache``; none without it."""

from __future__ import annotations

import logging
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.compat import hooking

logger = logging.getLogger(__name__)

_installed = False
#: The scheduler process has one controller; processes without a scheduler have none.
_controller: Any | None = None


def install() -> None:
    """Register hooks, tree and attention backend with SGLang; it applies them. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    registry, kind = compat.HookRegistry, compat.HookType
    for name, hook in (
        ("build_allocator", _after_build_allocator),
        ("decode_done", _after_decode),
        ("prefill_done", _after_prefill),
        ("count_uncached", _after_count_uncached),
        ("decode_log_parts", _after_decode_log_parts),
        ("internal_state", _after_internal_state),
    ):
        registry.register(compat.HOOK_TARGETS[name], hook, kind.AFTER)
    compat.register_radix_cache_backend(compat.TREE_BACKEND, _make_tree)
    for name in compat.CORRECTABLE_BACKENDS:
        # Our own is there on our CPU platform only.
        if name in compat.ATTENTION_BACKENDS:
            _wrap_attention_backend(name)


def check_installed() -> None:
    """Raises RuntimeError when SGLang could not apply one of our hooks (it only logs that)."""
    hooking.check_applied(compat.HOOK_TARGETS.values())


def _config() -> Any:
    from sglang_reasoncache.plugin.flags import config_of

    return config_of(compat.get_server_args())


def _after_build_allocator(result: Any, _configurator: Any, **_kwargs: Any) -> Any:
    """Exchange the freshly built allocator for ours; also gives slots their cached positions."""
    if _config() is None:
        # An enabled server ran in this parent process before; this one is stock.
        return None
    from sglang_reasoncache.plugin import assembly

    return assembly.shared_allocator(result)


def _make_tree(context: Any) -> Any:
    """Radix-cache factory: the tree and the controller of this scheduler."""
    from sglang_reasoncache.plugin import assembly

    global _controller
    check_installed()
    tree = assembly.tree(context, _config())
    _controller = tree.controller
    return tree


def _wrap_attention_backend(name: str) -> None:
    stock = compat.ATTENTION_BACKENDS[name]

    def make(model_runner: Any) -> Any:
        from sglang_reasoncache.plugin import assembly

        config = _config()
        if config is None:
            return stock(model_runner)
        return assembly.attention_backend(model_runner, config, name, stock)

    compat.register_attention_backend(name)(make)


def _after_prefill(_result: None, processor: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Under mixed chunk, decoding requests ride on a prefill batch, as its last ones."""
    if _controller is None:
        return
    riders = batch.decoding_reqs or []
    count = len(batch.reqs) - len(riders)
    written = [a + b for a, b in zip(batch.prefix_lens[:count], batch.extend_lens, strict=False)]
    freed = _controller.after_prefill(batch.reqs[:count], written)
    if riders:
        freed += _controller.after_decode(riders)
    _admit_again(_controller, processor, freed)


def _after_decode(_result: None, processor: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    if _controller is not None:
        _admit_again(_controller, processor, _controller.after_decode(batch.reqs))


def _admit_again(controller: Any, processor: Any, freed: int) -> None:
    if freed and controller.config.admission_credit > 0:
        # SGLang stops trying to admit once memory ran out and tries again when
        # a request leaves; slots that come back in between must count as well.
        processor.metrics_reporter.scheduler.running_batch.batch_is_full = False


def _after_count_uncached(result: tuple[int, int], _checker: Any) -> tuple[int, int] | None:
    """SGLang counts the row positions of running requests; a shared one is counted at its owner,
    an evicted one not at all."""
    if _controller is None:
        return None
    full, window = result
    return full - _controller.saved_positions, window


def _after_decode_log_parts(result: list[str], _stats: Any) -> list[str] | None:
    return None if _controller is None else [*result, _controller.log_part()]


def _after_internal_state(_result: None, _owner: Any, state: dict[str, Any]) -> None:
    """``GET /server_info`` lists each scheduler's internal state; ours rides along."""
    if _controller is not None:
        state["reasoncache"] = _controller.describe()
