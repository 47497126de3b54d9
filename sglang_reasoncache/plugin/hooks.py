# SPDX-License-Identifier: Apache-2.0
"""Hooks of a server that runs with ``--enable-reasoncache``; none without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.compat import hooking
from sglang_reasoncache.compat.types import ScheduleBatch, TreeCacheBuildContext

if TYPE_CHECKING:
    from sglang_reasoncache.plugin.controller import Controller
    from sglang_reasoncache.plugin.server import ServerParts

_installed = False
#: Of the scheduler process; processes without a scheduler have none.
_server: ServerParts | None = None


def install() -> None:
    """Register hooks, tree and attention backend with SGLang; it applies them. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    hooks: dict[str, Callable[..., Any]] = {
        "build_allocator": _after_build_allocator,
        "decode_done": _after_decode,
        "prefill_done": _after_prefill,
        "count_uncached": _after_count_uncached,
        "decode_log_parts": _after_decode_log_parts,
        "internal_state": _after_internal_state,
    }
    for name, hook in hooks.items():
        compat.HookRegistry.register(compat.HOOK_TARGETS[name], hook, compat.HookType.AFTER)
    compat.register_radix_cache_backend(compat.TREE_BACKEND, _make_tree)
    for name in compat.CORRECTABLE_BACKENDS:
        # Our own is there on our CPU platform only.
        if name in compat.ATTENTION_BACKENDS:
            _wrap_attention_backend(name)


def _after_build_allocator(result: Any, _configurator: Any, **_kwargs: Any) -> Any:
    """Exchange the freshly built allocator for ours."""
    from sglang_reasoncache.plugin.flags import config_of
    from sglang_reasoncache.plugin.server import ServerParts

    global _server
    config = config_of(compat.get_server_args())
    # None: an enabled server ran in this parent process before; this one is stock.
    _server = None if config is None else ServerParts(config, result)
    return None if _server is None else _server.allocator


def _make_tree(context: TreeCacheBuildContext) -> Any:
    """Radix-cache factory: the tree and the controller of this scheduler."""
    hooking.check_applied(compat.HOOK_TARGETS.values())
    assert _server is not None, "SGLang builds the allocator before the prefix cache"
    return _server.tree(context)


def _wrap_attention_backend(name: str) -> None:
    stock = compat.ATTENTION_BACKENDS[name]

    def make(model_runner: Any) -> Any:
        if _server is None:
            return stock(model_runner)
        return _server.attention_backend(model_runner, name, stock)

    compat.register_attention_backend(name)(make)


def _controller() -> Controller | None:
    return None if _server is None else _server.controller


def _after_prefill(_result: None, processor: Any, batch: ScheduleBatch, *_: Any, **__: Any) -> None:
    """Under mixed chunk, decoding requests ride on a prefill batch, as its last ones."""
    controller = _controller()
    if controller is None:
        return
    riders = batch.decoding_reqs or []
    count = len(batch.reqs) - len(riders)
    written = [a + b for a, b in zip(batch.prefix_lens[:count], batch.extend_lens, strict=False)]
    freed = controller.after_prefill(batch.reqs[:count], written)
    if riders:
        freed += controller.after_decode(riders)
    _admit_again(controller, processor, freed)


def _after_decode(_result: None, processor: Any, batch: ScheduleBatch, *_: Any, **__: Any) -> None:
    controller = _controller()
    if controller is not None:
        _admit_again(controller, processor, controller.after_decode(batch.reqs))


def _admit_again(controller: Controller, processor: Any, freed: int) -> None:
    if freed and controller.config.admission_credit > 0:
        # SGLang stops admitting once memory ran out, until a request leaves.
        processor.metrics_reporter.scheduler.running_batch.batch_is_full = False


def _after_count_uncached(result: tuple[int, int], _checker: Any) -> tuple[int, int] | None:
    """SGLang counts the row positions of running requests; a shared one is counted at its owner,
    an evicted one not at all."""
    controller = _controller()
    if controller is None:
        return None
    full, window = result
    return full - controller.saved_positions, window


def _after_decode_log_parts(result: list[str], _stats: Any) -> list[str] | None:
    controller = _controller()
    return None if controller is None else [*result, controller.report.log_part()]


def _after_internal_state(_result: None, _owner: Any, state: dict[str, Any]) -> None:
    """``GET /server_info`` lists each scheduler's internal state; ours is one more entry."""
    controller = _controller()
    if controller is not None:
        state["reasoncache"] = controller.describe()
