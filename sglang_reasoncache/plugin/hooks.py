# SPDX-License-Identifier: Apache-2.0
"""The hooks that ``--enable-reasoncache`` installs in SGLang. Without the flag none of them is installed."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.swap import copied_of
from sglang_reasoncache.compat.types import ScheduleBatch, ServerArgs, TreeCacheBuildContext
from sglang_reasoncache.custom_params import OPT_OUT_KEY, asked_of, documents_of
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.plugin import routes

if TYPE_CHECKING:
    from sglang_reasoncache.plugin.controller import Controller
    from sglang_reasoncache.plugin.disaggregation import PreallocAdmission
    from sglang_reasoncache.plugin.server import ServerParts
    from sglang_reasoncache.plugin.unshared import Unshared

#: The plugin's parts in a scheduler process; None in other processes, and where nothing can be shared.
_server: ServerParts | None = None
#: What runs instead of these parts where nothing can be shared; else None.
_unshared: Unshared | None = None


@functools.cache
def install() -> None:
    """Register our hooks, prefix tree and attention backends with SGLang. ``HookRegistry.apply_hooks`` applies
    the hooks later. Calls of ``install`` after the first do nothing."""
    hooks: dict[str, Callable[..., Any]] = {
        "decode_done": _contained(_after_decode, _after_decode_unshared),
        "prefill_done": _contained(_after_prefill, _after_prefill_unshared),
        "count_uncached": _contained(_after_count_uncached),
        "decode_log_parts": _contained(_after_decode_log_parts, _after_decode_log_parts),
        "prefill_ready": _contained(_after_prefill_ready, _after_prefill_ready_unshared),
        "retracted": _contained(_after_retracted, _after_retracted),
        "make_abort": _contained(_after_make_abort),
    }
    hooks |= dict.fromkeys(compat.WEIGHT_HOOKS, _contained(_after_weights))
    hooks |= {"build_allocator": _after_build_allocator, "verify": _after_verify}
    hooks |= {"hybrid_backend": _after_hybrid_backend, "prealloc_done": _after_prealloc}
    hooks |= {"decode_queue": _after_decode_queue}
    for name, hook in hooks.items():
        compat.register_hook(compat.HOOK_TARGETS[name], hook, compat.HookType.AFTER)
    around: dict[str, Callable[..., Any]] = {
        "internal_state": _around_internal_state,
        "pause": _around_pause,
        "release": _around_release,
        "prealloc_budget": _admission("around_budget"),
        "prealloc_required": _admission("around_required"),
        "prealloc_fits": _admission("around_fits"),
    }
    for name, hook in around.items():
        compat.register_hook(compat.HOOK_TARGETS[name], hook, compat.HookType.AROUND)
    compat.register_resolution_hook(compat.ATTENTION_STEP)(_around_attention_default)
    compat.register_radix_cache_backend(compat.TREE_BACKEND, _make_tree)
    for name in (*compat.OUR_BACKENDS, *compat.SPARSE_BACKENDS):
        # ``compat.CPU_BACKEND`` is in this registry only on our CPU platform (``cpu/platform.py``).
        if name in compat.ATTENTION_BACKENDS:
            make = functools.partial(_make_attention, name, compat.ATTENTION_BACKENDS[name])
            compat.register_attention_backend(name)(make)


def install_frontend() -> None:
    """Install the hooks of a process that parses requests: the server's main process or, with
    ``--tokenizer-worker-num``, its workers (``worker.py``)."""
    from sglang_reasoncache.plugin import documents, waiting

    targets = compat.FRONTEND_HOOK_TARGETS
    compat.apply_hooks(
        {
            targets["generate"]: (documents.around_generate, compat.HookType.AROUND),
            targets["chat"]: (documents.after_chat, compat.HookType.AFTER),
            targets["abort"]: (waiting.after_abort, compat.HookType.AFTER),
            targets["meta_info"]: (_around_meta_info, compat.HookType.AROUND),
            targets["abort_done"]: (_around_abort_done, compat.HookType.AROUND),
        }
    )


def _around_meta_info(
    stock: Callable[..., None], manager: Any, meta_info: dict[str, Any], state: Any,
    customized_info: dict[str, list[Any]], index: int, finish_reason: Any,
) -> None:  # fmt: skip
    """Put the record of a finished response (``Report.to_response``) into its ``meta_info``. Without this hook
    it would come behind an entry without content for each earlier token."""
    mine = customized_info.get(OPT_OUT_KEY)
    others = {key: each for key, each in customized_info.items() if key != OPT_OUT_KEY}
    stock(manager, meta_info, state, others, index, finish_reason)
    record = (
        None if mine is None else next((each for each in mine[index] if each is not None), None)
    )
    if record is not None:
        meta_info[OPT_OUT_KEY] = record


def _after_make_abort(
    controller: Controller, result: Any, req: Any, finished_reason: Any = None
) -> Any:
    """Send the record of a request that is aborted while it waits with the reason of its end, as JSON: values
    there may be texts and numbers. Without a reason SGLang's main process has one of its own, the same as
    here."""
    record = controller.report.record_to_send(req)
    if record is None:
        return None
    reason = finished_reason or {"type": "abort", "message": "Abort in waiting queue"}
    result.finished_reason = {**reason, OPT_OUT_KEY: json.dumps(record)}
    return result


def _around_abort_done(stock: Callable[[Any, Any], None], manager: Any, recv_obj: Any) -> None:
    """Put the record of a request that was aborted while it waited into the ``meta_info`` of its response."""
    reason = recv_obj.finished_reason or {}
    record = reason.pop(OPT_OUT_KEY, None)
    state = manager.rid_to_state.get(recv_obj.rid)
    stock(manager, recv_obj)
    # SGLang answers no request with the id of a health check.
    if record is not None and state is not None and state.out_list:
        state.out_list[-1]["meta_info"][OPT_OUT_KEY] = json.loads(record)


def _after_verify(_result: None, params: Any, _vocab_size: int) -> None:
    """Raise ValueError if ``custom_params`` has wrong values for our keys: SGLang then answers with status 400
    before a scheduler sees the request. With SGLang 0.5.22, or an application that the operator named
    (``compat.APP_ENV``), worker processes of ``--tokenizer-worker-num`` let wrong values through. The scheduler
    then treats a request with a wrong opt-out value as opted out, and ignores wrong documents."""
    from sglang_reasoncache.config import config_of

    if config_of(compat.get_server_args()) is None:
        # This server runs without the plugin; an earlier server in this process installed the hooks. (If both
        # run, the later one decides for both. A scheduler takes wrong values as opted out.)
        return
    asked_of(params.custom_params)
    documents_of(params.custom_params)


def _after_build_allocator(result: Any, configurator: Any, **_kwargs: Any) -> Any:
    """Replace SGLang's new allocator (``result``) with ours. A draft model's pool shares that of the target.

    Where KV cannot be shared, SGLang's allocator stays. Raises ValueError then if a policy is to evict or
    select, or keys must be corrected."""
    from sglang_reasoncache.config import config_of
    from sglang_reasoncache.plugin.server import (
        ServerParts,
        check_build,
        dp_rank,
        for_limited_queue,
    )
    from sglang_reasoncache.plugin.unshared import Unshared

    global _server, _unshared
    if configurator.is_draft_worker:
        return None
    _server = None
    _unshared = None
    config = config_of(compat.get_server_args())
    if config is None:
        # This server runs without the plugin; an earlier server in this process installed the hooks.
        return None
    config = for_limited_queue(config)
    check_build(config)
    try:
        _server = ServerParts(config, result)
    except CannotShare as error:
        if config.policies.needs_our_attention or config.positions == "corrected":
            raise
        _unshared = Unshared(config, result, str(error), dp_rank())
        return None
    return _server.allocator


def _make_tree(context: TreeCacheBuildContext) -> Any:
    """Called by SGLang's radix-cache registry. Builds this scheduler's prefix tree and controller."""
    compat.check_applied(compat.HOOK_TARGETS.values())
    if _unshared is not None:
        from sglang_reasoncache.plugin.server import metrics_of

        return _unshared.tree(context, metrics_of(context))
    assert _server is not None, "SGLang builds the allocator before the prefix cache"
    return _server.tree(context)


def _around_attention_default(server_args: ServerArgs, stock: Callable[[ServerArgs], None]) -> None:
    from sglang_reasoncache.config import config_of
    from sglang_reasoncache.plugin import attention

    config = config_of(server_args)
    stock(server_args)
    if config is not None:
        attention.choose_draft_backend(server_args, config)


def _make_attention(name: str, stock: Callable[[Any], Any], model_runner: Any) -> Any:
    if _server is None:
        return stock(model_runner)
    if model_runner.is_draft_worker:
        # It reads shared keys as cached: that changes which tokens it drafts, not which are accepted.
        _server.draft_model(model_runner)
        return stock(model_runner)
    if name in compat.SPARSE_BACKENDS:
        return stock(model_runner)
    return _server.attention_backend(model_runner, name, stock)


def _after_hybrid_backend(result: Any, _runner: Any, attention: Any) -> None:
    """For a hybrid model SGLang wraps the backend ``attention`` in a backend that also runs state layers (such
    as Mamba). SGLang asks the wrapper whether a prefill may run in a CUDA graph: let our backend answer."""
    ours = getattr(attention, "can_run_prefill_cuda_graph", None)
    if ours is not None and result is not attention:
        result.can_run_prefill_cuda_graph = ours


def _contained(
    shared: Callable[..., Any] | None, unshared: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A hook that calls ``shared`` with the controller as first argument or, where nothing can be shared,
    ``unshared`` with what replaces the controller. It does nothing if that is None, and in processes that have
    neither. A hook that returns None or fails leaves the result of SGLang's function as it is."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        owner: Any = _unshared or (_server and _server.controller)
        hook = shared if _unshared is None else unshared
        if owner is None or hook is None:
            return None
        with owner.containment:
            return hook(owner, *args, **kwargs)
        return None

    return hooked


def _admission(method: str) -> Callable[..., Any]:
    """A hook around a method of SGLang's queue on the decode server of a PD pair: a method of
    ``PreallocAdmission``. Elsewhere SGLang's is called as it is."""

    def hooked(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        admission = _prealloc_admission()
        if admission is None:
            return stock(*args, **kwargs)
        return getattr(admission, method)(stock, *args, **kwargs)

    return hooked


def _after_decode_queue(_result: None, scheduler: Any) -> None:
    """Let requests of the decode server of a PD pair run whose prompts have arrived."""
    admission = _prealloc_admission()
    if admission is not None:
        admission.after_queue(scheduler)


def _prealloc_admission() -> PreallocAdmission | None:
    """What decides on the decode server of a PD pair. None on other servers."""
    parts = _unshared or _server
    return None if parts is None else parts.admission


def _after_prefill(
    controller: Controller, _result: None, processor: Any, batch: ScheduleBatch, *_: Any, **__: Any
) -> None:
    """Hand a prefill batch to the controller. ``--enable-mixed-chunk`` appends decode requests to the batch."""
    riders = batch.decoding_reqs or []
    count = len(batch.reqs) - len(riders)
    # ``map`` is lazy, so the sums are computed in the controller, which reports a failure to the other ranks.
    written = map(operator.add, batch.prefix_lens[:count], batch.extend_lens)
    freed = controller.after_prefill(batch.reqs[:count], written)
    if riders:
        freed += controller.after_decode(riders)
    _admit_again(processor, freed > 0)


def _after_prefill_ready(controller: Controller, _result: None, batch: ScheduleBatch) -> None:
    """Once a prefill has its slots, before its forward, show the controller its requests, and prepare document
    repairs (``cache/repair.py``)."""
    controller.before_prefill(batch.reqs, batch.req_pool_indices)
    repairs = batch.tree_cache.token_to_kv_pool_allocator.repairs
    if repairs.begin(batch):
        controller.containment.together(repairs.prepare, batch, controller.ranks)


def _after_prefill_ready_unshared(unshared: Unshared, _result: None, batch: ScheduleBatch) -> None:
    unshared.before_prefill(batch.reqs)


def _after_prealloc(_result: Any, _queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """On the decode server of a PD pair, when a request gets slots, before the other server is told of them.
    Even if the plugin has failed: keys that are shared must be read right."""
    if _server is not None:
        _server.allocator.preallocated(req)


def _around_pause(stock: Callable[[Any, Any], None], scheduler: Any, recv_req: Any) -> None:
    """SGLang may retract all requests for a pause, in which the weights may change: their KV is computed again,
    and so is that of requests which wait already."""
    controller = None if _server is None else _server.controller
    if controller is None or recv_req.mode != "retract":
        stock(scheduler, recv_req)
        return
    with controller.pausing():
        stock(scheduler, recv_req)


def _after_weights(controller: Controller, _result: Any, *_: Any, **__: Any) -> None:
    """New weights were loaded, perhaps without a flush: SGLang computes the KV of requests that wait with
    these. Or loading failed, perhaps on this rank only."""
    controller.weights_changed()


def _around_release(stock: Callable[..., bool], **named: Any) -> bool:
    """SGLang releases a retracted request, and evicts cached prefixes for steps to come."""
    if _server is None:
        return stock(**named)
    with _server.allocator.releasing():
        return stock(**named)


def _after_decode(
    controller: Controller,
    _result: None,
    processor: Any,
    batch: ScheduleBatch,
    output: Any,
    *_: Any,
    **__: Any,
) -> None:
    # ``partial``, as ``map`` above.
    freed = controller.after_decode(batch.reqs, functools.partial(_tokens, batch, output))
    _admit_again(processor, controller.admits_again() or freed > 0)


def _after_decode_unshared(
    unshared: Unshared, _result: None, _processor: Any, batch: ScheduleBatch, output: Any, *_: Any, **__: Any
) -> None:  # fmt: skip
    unshared.after_decode(_tokens(batch, output))


def _tokens(batch: ScheduleBatch, output: Any) -> int:
    """How many tokens a decode step gave: with speculation several a request."""
    accepted = output.accept_lens
    return len(batch.reqs) if accepted is None else int(accepted.sum())


def _after_prefill_unshared(
    unshared: Unshared, _result: None, _processor: Any, batch: ScheduleBatch, *_: Any, **__: Any
) -> None:
    if batch.decoding_reqs:
        unshared.after_decode(len(batch.decoding_reqs))


def _after_retracted(
    owner: Controller | Unshared, result: tuple[Any, ...], _batch: ScheduleBatch
) -> None:
    """Learn from the requests that SGLang retracted because it was short of slots. It also retracts for a pause
    and for requests of higher priority, when slots may be free: not by this method."""
    # SGLang ends those that it cannot retract.
    retracted, _, ended = result
    for req in (*retracted, *ended):
        length = len(req.origin_input_ids) + len(req.output_ids)
        owner.shortage.headroom.lost(length, copied_of(req))
    for req in ended:
        owner.dropped(req.cache_request_handle)


def _admit_again(processor: Any, yes: bool) -> None:
    if yes:
        # SGLang sets this flag when slots run out. It then admits no request until a running request leaves.
        processor.metrics_reporter.scheduler.running_batch.batch_is_full = False


def _after_count_uncached(
    controller: Controller, result: tuple[int, int], _checker: Any
) -> tuple[int, int]:
    """SGLang counts one slot for each position that running requests hold outside the prefix tree. Subtract the
    slots that sharing and evicting saved, so that SGLang's check for leaked slots passes."""
    full, window = result
    return full - controller.report.slots_saved, window


def _after_decode_log_parts(
    owner: Controller | Unshared, result: list[str], _stats: Any
) -> list[str]:
    return [*result, owner.log_part()]


def _around_internal_state(stock: Callable[..., Any], owner: Any, request: Any) -> Any:
    """Add our entry to the scheduler's internal state, which ``GET /server_info`` lists. If only our entry is
    requested, leave out SGLang's entries, which take the scheduler three milliseconds to collect."""
    ours: Any = _unshared or (_server and _server.controller)
    path = request.rid or ""
    if ours is None or not path.startswith(routes.TOTALS):
        result = stock(owner, request)
    else:
        result = compat.GetInternalStateReqOutput(internal_state={})
    if ours is not None:
        with ours.containment:
            result.internal_state["reasoncache"] = routes.answer(ours, path)
    return result
