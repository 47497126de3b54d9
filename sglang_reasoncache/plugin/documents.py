# SPDX-License-Identifier: Apache-2.0
"""Prepares documents (marked parts of a prompt, see ``custom_params.py``) in the process that serves HTTP:
finds the tokens of marked chat messages, marks known text if the operator wants that (``documents=auto``), and
has documents prefilled before the request that contains them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import itertools
import logging
import os
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import HTTPException

from sglang_reasoncache import compat
from sglang_reasoncache import custom_params as marks
from sglang_reasoncache.compat.carriers import COMPOSES, FINDER
from sglang_reasoncache.config import ReasonCacheConfig, config_of
from sglang_reasoncache.filter.documents import DocumentFinder
from sglang_reasoncache.plugin import header
from sglang_reasoncache.plugin.routes import TOTALS
from sglang_reasoncache.plugin.waiting import waiting

logger = logging.getLogger(__name__)

#: SGLang's ``generate_request``.
Generate = Callable[..., AsyncGenerator[Any, None]]
#: At most this many documents of a request are prefilled at once.
_TOGETHER = 16
#: Prefills of a request with a longer id have ids of their own: each of up to 256 prefills would send it.
_LONGEST_ID = 256
#: What SGLang says of a request that its queue has no room for.
_FULL = "The request queue is full."
#: Sampling parameters that hold a grammar.
_GRAMMARS = "json_schema", "regex", "ebnf", "structural_tag"
#: Processes that serve HTTP begin at different replicas.
_ranks = itertools.count(os.getpid())


def around_generate(
    original: Generate, manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Hook around SGLang's ``generate_request``, which every API calls: reads our header, and prefills marked
    documents first."""
    config = config_of(manager.server_args)
    if config is None:
        # This server runs without the plugin; an earlier server in this process installed the hooks.
        return original(manager, obj, request)
    header.apply(manager, obj, request)
    params = getattr(obj, "sampling_params", None)
    alike = params if isinstance(params, list) else [params]
    marked = any(
        isinstance(each, dict) and _custom(each).get(marks.KEY) and not _has_beams(each)
        for each in alike
    )
    if not isinstance(obj, compat.GenerateReqInput):
        return original(manager, obj, request)
    if marked:
        return _behind_documents(original, manager, obj, request)
    if config.documents == "auto" and _may_compose(manager, obj):
        return _behind_known(original, manager, obj, request, config)
    return original(manager, obj, request)


def _custom(params: dict[str, Any]) -> dict[str, Any]:
    custom = params.get("custom_params")
    return custom if isinstance(custom, dict) else {}


def _has_beams(params: dict[str, Any]) -> bool:
    """Whether a request searches with beams: the scheduler composes no prompt of it."""
    return params.get("beam_width") not in (None, 1)


def _settled(manager: Any, params: Any) -> Any:
    """``params`` of a request behind those that the operator prefers, as SGLang settles them: the request's
    ``custom_params`` replace the operator's as a whole."""
    if not isinstance(params, dict | None):
        return params
    return {**(manager.preferred_sampling_params or {}), **(params or {})}


def _may_compose(manager: Any, obj: Any) -> bool:
    """Whether a request that marks no documents may read some: it has a single prompt without media, and asks
    for output, not for figures of its prompt. A prompt's log-probabilities are asked for separately."""
    params = _settled(manager, obj.sampling_params)
    ids = obj.input_ids
    if ids is None:
        single = isinstance(obj.text, str)
    else:
        single = isinstance(ids, list) and len(ids) > 0 and isinstance(ids[0], int)
    if not single or not isinstance(params, dict) or obj.contains_mm_input() or _has_beams(params):
        return False
    exact = (
        "input_embeds",
        "positional_embed_overrides",
        "session_params",
        "multi_item_delimiter_indices",
        "return_hidden_states",
    )
    if params.get("max_new_tokens") == 0 or any(getattr(obj, name, None) for name in exact):
        return False
    # A wrong value raises. SGLang then refuses a wrong opt-out; a wrong repair has no effect without marks.
    with contextlib.suppress(Exception):
        marks.repair_of(_custom(params).get(marks.REPAIR_KEY, "none"))
        return marks.asked_of(params.get("custom_params")).share
    return False


async def _behind_known(
    original: Generate,
    manager: Any,
    obj: Any,
    request: Any,
    config: ReasonCacheConfig,
) -> AsyncIterator[Any]:
    """Mark the documents of ``obj`` that are known, then generate as if the client had marked them."""
    spans = list[tuple[int, int]]()
    prompt = obj.input_ids
    if await _composes(manager):
        try:
            if prompt is None:
                prompt, _ = await manager._tokenize_texts(obj.text)
            length = _verified_length(manager, obj, prompt)
            # As SGLang does. It raises if there is anything but numbers of 64 bits.
            array("q", prompt)
        except Exception:  # SGLang refuses the request below.
            length = 0
        start = obj.logprob_start_len
        asks_prompt = obj.return_logprob and start is not None and 0 <= start < length
        if length and not asks_prompt:
            spans = _known(manager, obj, prompt[:length], config)
    if not spans:
        async for response in original(manager, obj, request):
            yield response
        return
    custom = _custom(_settled(manager, obj.sampling_params))
    obj.sampling_params = {
        **(obj.sampling_params or {}),
        "custom_params": {**custom, marks.KEY: spans},
    }
    obj.input_ids = prompt
    obj.text = None
    async for response in _behind_documents(original, manager, obj, request):
        yield response


def _known(
    manager: Any, obj: Any, prompt: list[int], config: ReasonCacheConfig
) -> list[tuple[int, int]]:
    """Spans of the known documents in ``prompt``. If finding fails, nothing is found any more."""
    if not hasattr(manager, FINDER):
        setattr(manager, FINDER, DocumentFinder(config.documents_least))
    finder: DocumentFinder | None = getattr(manager, FINDER)
    if finder is None:
        return []
    # Requests with equal names read the same cached prefixes.
    names = repr((obj.lora_path, obj.extra_key, obj.cache_salt))
    try:
        spans = finder.find(hashlib.sha256(names.encode()).digest(), prompt)
    except Exception:
        logger.exception("reasoncache: documents=auto failed; only marked documents are used now")
        setattr(manager, FINDER, None)
        return []
    spans = spans[: marks.most_behind(spans[0][0])] if spans else []
    return spans if len(spans) > 1 else []


async def _behind_documents(
    original: Generate, manager: Any, obj: Any, request: Any
) -> AsyncIterator[Any]:
    """Prefill the documents of ``obj``, then generate. If a document is cached already, only its last token is
    computed. Raises ValueError for wrongly marked documents. If the schedulers do not compose prompts (read
    cached documents at new positions), no document is prefilled first. If SGLang aborts a prefill, or a client
    aborts ``obj`` meanwhile, the prefills end, and ``obj`` gets SGLang's answer to an aborted request."""
    prompt = obj.input_ids
    if not isinstance(obj.sampling_params, dict) or not prompt or isinstance(prompt[0], list):
        message = "needs a single prompt, as input_ids or as messages"
        raise ValueError(f"custom_params: {marks.KEY} {message}")
    config = config_of(manager.server_args)
    custom = obj.sampling_params["custom_params"]
    default = "none" if config is None else config.documents_repair
    custom = {marks.REPAIR_KEY: default, **custom}
    # Copied, because a caller of ``sglang.Engine`` may use its sampling parameters again.
    obj.sampling_params = {**obj.sampling_params, "custom_params": custom}
    # SGLang sets ``is_single`` only when it prepares the request, but reads it if the client leaves earlier.
    obj.is_single = True
    ranks = manager.elastic_worker_count
    if obj.routed_dp_rank is None:
        # Clients may still use ``data_parallel_rank``, the deprecated name of this field.
        obj.routed_dp_rank = obj.data_parallel_rank
    if obj.routed_dp_rank is None and ranks > 1:
        # Send documents and request to one replica, because each replica has a cache of its own.
        obj.routed_dp_rank = next(_ranks) % ranks
    documents = marks.documents_of(custom, _verified_length(manager, obj, prompt), flat=False)
    assert documents is not None
    # Without inner lists, which SGLang's msgpack between processes does not read (SGLANG_USE_PICKLE_IPC=0).
    custom[marks.KEY] = [bound for span in documents.spans() for bound in span]
    several = len(documents.ends) > 1 and not obj.contains_mm_input()
    if several and marks.asked_of(custom).share:
        with waiting(manager, obj, request) as held:
            reason = await held.until(_prefill(original, manager, obj, request, documents))
            answers = [] if reason is None else await held.answers(reason)
        if reason is not None:
            for answer in answers:
                yield answer
            return
    # SGLang registers the id of ``obj`` again before it first waits, so nothing can come between.
    async for response in original(manager, obj, request):
        yield response


async def _prefill(
    original: Generate,
    manager: Any,
    obj: Any,
    request: Any,
    documents: marks.Documents,
) -> dict[str, Any] | None:
    """Prefill the ``documents`` of ``obj``, if the schedulers compose prompts. Returns the finish reason of a
    prefill that SGLang aborted, perhaps with all requests. None if all prefills ended well, or if SGLang's
    queue has no room for one: SGLang then decides on ``obj`` itself, which reads what is cached by then."""
    if not await _composes(manager):
        return None
    prompt = obj.input_ids
    base = prompt[: documents.start]
    alone = [_request([*base, *prompt[slice(*span)]], obj) for span in documents.spans()]
    # One document is prefilled first, so that the base (the tokens before all documents) is computed once.
    # SGLang refuses what is more than --max-queued-requests.
    together = max(min(_TOGETHER, manager.server_args.max_queued_requests or _TOGETHER), 1)
    groups = [
        alone[:1],
        *(alone[at : at + together] for at in range(1, len(alone), together)),
    ]
    if documents.repair.share:
        custom = obj.sampling_params["custom_params"]
        custom = {key: custom[key] for key in (marks.KEY, marks.REPAIR_KEY)}
        # This request generates nothing. It measures which document tokens the text behind them attends to.
        groups.append([_request(prompt, obj, custom)])
    for group in groups:
        try:
            prefills = [original(manager, each, request) for each in group]
            answers = await first_answers(prefills)
        except HTTPException as error:
            if error.detail != _FULL:
                raise
            return None
        for answer in answers:
            reason: dict[str, Any] = answer["meta_info"]["finish_reason"] or {}
            if reason.get("message") == _FULL:
                return None
            if reason.get("type") == "abort":
                return reason
    return None


async def first_answers(generators: Sequence[AsyncGenerator[Any, None]]) -> list[Any]:
    """The first answer of each of SGLang's generators, which run together. If one fails, the others are not
    needed. All are closed before this returns or raises: one that has answered holds a lock until then, and a
    pause or an update of weights waits for the lock."""
    sent = [asyncio.ensure_future(anext(each)) for each in generators]
    try:
        return await asyncio.gather(*sent)
    finally:
        for each in sent:
            each.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        closed = (each.aclose() for each in generators)
        await asyncio.gather(*closed, return_exceptions=True)


def _verified_length(manager: Any, obj: Any, prompt: Sequence[int]) -> int:
    """Number of tokens of ``prompt``, after truncation if SGLang is set to truncate. Raises ValueError for a
    request that SGLang would refuse, so that none of its documents is prefilled."""
    sampling = manager.sampling_params_class(**_settled(manager, obj.sampling_params))
    sampling.normalize(manager.tokenizer)
    sampling.verify(manager.model_config.vocab_size)
    alike = copy.copy(obj)
    kept = list(prompt)
    alike.sampling_params = dict(obj.sampling_params or {})
    manager._validate_one_request(alike, kept)
    return len(kept)


async def _composes(manager: Any) -> bool:
    """Whether the schedulers compose prompts of cached documents, asked until all of them have answered. Who
    asks meanwhile gets the same answer."""
    known: bool | asyncio.Future[bool] | None = getattr(manager, COMPOSES, None)
    if isinstance(known, bool):
        return known
    if known is None or known.done():
        known = asyncio.ensure_future(_ask(manager))
        setattr(manager, COMPOSES, known)
    # Shielded: if an aborted request stopped asking, the answer could reach whoever asks next.
    return await asyncio.shield(known)


async def _ask(manager: Any) -> bool:
    """See :func:`_composes`."""
    # Start the loop that receives answers, because this may be the server's first request.
    manager.auto_create_handle_loop()
    question = compat.GetInternalStateReq(rid=TOTALS)
    states = await manager.get_internal_state_communicator(question)
    entries = [state.internal_state.get("reasoncache") or {} for state in states]
    composes = all(state.get("documents_off", "") is None for state in entries)
    if all("documents_off" in state for state in entries):
        setattr(manager, COMPOSES, composes)
    return composes


def _request(prompt: Sequence[int], obj: Any, custom_params: dict[str, Any] | None = None) -> Any:
    """A request without output. It has the LoRA, cache keys and replica of ``obj``, so it uses the same cached
    prefixes. It also has the grammar of ``obj``, so that SGLang refuses a wrong grammar before any prefill. It
    streams if ``obj`` does, because SGLang raises refusals of schedulers only to who does not stream."""
    sampling = {name: obj.sampling_params.get(name) for name in _GRAMMARS}
    # The operator may prefer another minimum.
    sampling |= {"max_new_tokens": 0, "min_new_tokens": 0, "custom_params": custom_params}
    made = compat.GenerateReqInput(input_ids=list(prompt), sampling_params=sampling)
    alike = ("lora_path", "extra_key", "cache_salt", "routed_dp_rank", "priority", "routing_key")
    for name in (*alike, "stream", "background"):
        setattr(made, name, getattr(obj, name))
    has_short_id = isinstance(obj.rid, str) and len(obj.rid) <= _LONGEST_ID
    if has_short_id and not obj.rid.startswith(compat.HEALTH_CHECK_RID_PREFIX):
        # An abort of ``obj`` in another process that serves HTTP reaches the schedulers only. They abort all
        # requests whose id begins with the aborted id.
        made.rid = f"{obj.rid}-{uuid.uuid4().hex}"
    made.no_logs = True
    made.log_metrics = False
    return made


def after_chat(result: Any, serving: Any, request: Any, _raw_request: Any = None) -> None:
    """Hook after SGLang turned a chat request into tokens: replaces the numbers of marked messages by spans of
    tokens. Raises ValueError for wrong numbers, and if a marked message has no span in the prompt."""
    adapted, _ = result
    custom = _custom(adapted.sampling_params)
    marked = custom.get(marks.KEY)
    messages = request.messages
    if marked == "messages":
        marked = list(range(1, len(messages) - 1))
    if not isinstance(marked, list) or any(type(number) is not int for number in marked):
        # There are no marks, or the marks are spans already. ``documents_of`` refuses wrong spans later.
        return
    if adapted.image_data or adapted.video_data or adapted.audio_data:
        raise ValueError(
            f"custom_params: {marks.KEY} cannot be marked beside images, audio or video: such prompts read none"
        )
    wrong = f"custom_params: {marks.KEY} must be"
    numbers = f"{wrong} 'messages' or numbers of 1 to {marks.MOST} messages that follow one another"
    if not 1 <= len(marked) <= marks.MOST or marked != [*range(marked[0], marked[0] + len(marked))]:
        raise ValueError(f"{numbers}, got {marked!r:.80}")
    if not marked[0] >= 0 or marked[-1] >= len(messages) - 1:
        raise ValueError(f"{wrong} before the last of {len(messages)} messages, got {marked!r:.80}")
    base = _tokens(serving, request, messages[: marked[0]])
    marks.check_before(len(base), len(marked))
    spans = list[list[int]]()
    prompt = adapted.input_ids or []
    end = len(base)
    refusal = f"{wrong} token spans of input_ids here: the chat template writes"
    if base != prompt[: len(base)]:
        raise ValueError(f"{refusal} what is before messages[{marked[0]}] in another way behind it")
    for number in marked:
        start = end
        # Render the message directly behind the base, as it will be prefilled. If its tokens differ from the
        # prompt's, render it behind all earlier messages: the template may need those.
        for before, count in ((messages[: marked[0]], len(base)), (messages[:number], start)):
            with contextlib.suppress(Exception):
                marks.check_before(count, len(marked))
                tokens = _tokens(serving, request, [*before, messages[number]])
                last = start + len(tokens) - count
                if tokens == prompt[:count] + prompt[start:last]:
                    end = last
                    break
        if end <= start:
            raise ValueError(f"{refusal} messages[{number}] in another way behind others")
        spans.append([start, end])
    adapted.sampling_params["custom_params"] = {**custom, marks.KEY: spans}


def _tokens(serving: Any, request: Any, messages: Sequence[Any]) -> list[int]:
    """Tokens of the prompt that ``request`` would have with only ``messages`` and no generation prompt."""
    if not messages:
        return []
    alone = {"messages": [message.model_copy(deep=True) for message in messages]}
    begin = request.model_copy(update=alone)
    begin._format_add_generation_prompt = False
    return list(serving._process_messages(begin, False).prompt_ids)
