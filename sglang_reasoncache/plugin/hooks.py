# SPDX-License-Identifier: Apache-2.0
"""Hooks of a server that runs with ``--enable-reasoncache``; none without it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.compat.types import ScheduleBatch, ServerArgs, TreeCacheBuildContext

if TYPE_CHECKING:
    from sglang_reasoncache.plugin.controller import Controller
    from sglang_reasoncache.plugin.server import ServerParts

#: What sharing did, as JSON, one entry per scheduler.
_ROUTE = "/reasoncache"
#: Likewise, with what it did to single requests; the id by which a scheduler is asked for that.
_DETAILS = "/reasoncache/details"
#: Of the scheduler process; processes without a scheduler have none.
_server: ServerParts | None = None


@functools.cache
def install() -> None:
    """Register hooks, tree and attention backend with SGLang; it applies them. Idempotent."""
    hooks: dict[str, Callable[..., Any]] = {
        "decode_done": _after_decode,
        "prefill_done": _after_prefill,
        "count_uncached": _after_count_uncached,
        "decode_log_parts": _after_decode_log_parts,
        "internal_state": _after_internal_state,
    }
    hooks = {name: _with_controller(hook) for name, hook in hooks.items()}
    hooks |= {"build_allocator": _after_build_allocator, "verify": _after_verify}
    for name, hook in hooks.items():
        compat.HookRegistry.register(compat.HOOK_TARGETS[name], hook, compat.HookType.AFTER)
    compat.register_resolution_hook(compat.ATTENTION_STEP)(_before_attention_default)
    compat.register_radix_cache_backend(compat.TREE_BACKEND, _make_tree)
    for name in compat.CORRECTABLE_BACKENDS:
        # Our own is there on our CPU platform only.
        if name in compat.ATTENTION_BACKENDS:
            make = functools.partial(_make_attention, name, compat.ATTENTION_BACKENDS[name])
            compat.register_attention_backend(name)(make)


def add_routes() -> None:
    """Add ``GET /reasoncache`` and its details to SGLang's HTTP application, in the server's main
    process. Where there is an ``--admin-api-key``, details, other clients' request ids, want it."""
    present = {getattr(route, "path", None) for route in compat.http_app.routes}
    for_admins = compat.auth_level(compat.AuthLevel.ADMIN_OPTIONAL)
    for path, endpoint in {_ROUTE: _totals, _DETAILS: for_admins(_details)}.items():
        if path not in present:
            compat.http_app.add_api_route(path, endpoint, methods=["GET"])


async def _totals() -> dict[str, Any]:
    return await _schedulers(None)


async def _details() -> dict[str, Any]:
    return await _schedulers(_DETAILS)


async def _schedulers(rid: str | None) -> dict[str, Any]:
    """What each scheduler says; it travels the way ``/server_info`` gets its states."""
    manager = compat.http_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    asked = compat.GetInternalStateReq(rid=rid)
    states = [told.internal_state for told in await manager.get_internal_state_communicator(asked)]
    return {"schedulers": [state.get("reasoncache") for state in states]}


def _after_verify(_result: None, params: Any, _vocab_size: int) -> None:
    """SGLang answers a ValueError with status 400, before the scheduler sees the request. Workers of
    ``--tokenizer-worker-num`` load no plugins: what they let through opts out."""
    from sglang_reasoncache.sharing.state import asks_to_share

    asks_to_share(params.custom_params)


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
    compat.check_applied(compat.HOOK_TARGETS.values())
    assert _server is not None, "SGLang builds the allocator before the prefix cache"
    return _server.tree(context)


def _before_attention_default(server_args: ServerArgs, stock: Callable[[ServerArgs], None]) -> None:
    from sglang_reasoncache.plugin import attention
    from sglang_reasoncache.plugin.flags import config_of

    config = config_of(server_args)
    if config is not None:
        attention.choose_backend(server_args, config)
    stock(server_args)


def _make_attention(name: str, stock: Callable[[Any], Any], model_runner: Any) -> Any:
    if _server is None:
        return stock(model_runner)
    return _server.attention_backend(model_runner, name, stock)


def _with_controller(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` takes the controller first, and is not called in a process without one. None, also
    where it fails, leaves what SGLang's function returned."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        controller = None if _server is None else _server.controller
        if controller is None:
            return None
        with controller.containment:
            return hook(controller, *args, **kwargs)
        return None

    return hooked


def _after_prefill(
    controller: Controller, _result: None, processor: Any, batch: ScheduleBatch, *_: Any, **__: Any
) -> None:
    """Under mixed chunk, decoding requests ride on a prefill batch, as its last ones."""
    riders = batch.decoding_reqs or []
    count = len(batch.reqs) - len(riders)
    # Computed where other ranks are told if that fails.
    written = map(operator.add, batch.prefix_lens[:count], batch.extend_lens)
    freed = controller.after_prefill(batch.reqs[:count], written)
    if riders:
        freed += controller.after_decode(riders)
    _admit_again(controller, processor, freed)


def _after_decode(
    controller: Controller, _result: None, processor: Any, batch: ScheduleBatch, *_: Any, **__: Any
) -> None:
    _admit_again(controller, processor, controller.after_decode(batch.reqs))


def _admit_again(controller: Controller, processor: Any, freed: int) -> None:
    if freed > 0:
        # SGLang stops admitting once memory ran out, until a request leaves.
        processor.metrics_reporter.scheduler.running_batch.batch_is_full = False


def _after_count_uncached(
    controller: Controller, result: tuple[int, int], _checker: Any
) -> tuple[int, int]:
    """SGLang counts the row positions of running requests, shared and evicted ones too."""
    full, window = result
    return full - controller.saved_positions, window


def _after_decode_log_parts(controller: Controller, result: list[str], _stats: Any) -> list[str]:
    return [*result, controller.report.log_part()]


def _after_internal_state(controller: Controller, result: Any, _owner: Any, asked: Any) -> None:
    """``GET /server_info`` lists each scheduler's internal state; ours is one more entry."""
    result.internal_state["reasoncache"] = controller.describe(details=asked.rid == _DETAILS)
