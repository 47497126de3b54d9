# SPDX-License-Identifier: Apache-2.0
"""Where the plugin rides on SGLang's objects, because SGLang has no place of its own for what we need there.

- ``ServerArgs``, attribute :data:`CONFIG`: the operator's settings (``plugin/flags.py``, ``config.py``).
- ``Req``, attribute :data:`RECORD`: our record of the request (``sharing/request.py``).
- ``Req``, attribute :data:`ASKED`: whether the request shares, and asks for a record (``custom_params.py``).
- ``Req``, attribute :data:`DOCUMENTS`: the documents that the client marked, and what is known of them
  (``cache/composition.py``).
- ``Req``, attribute :data:`SWAPPED`: the KV of a retracted request on the host (``cache/swap.py``).
- ``Req``, attribute :data:`COPIED`: what SGLang's own copy of a retracted request's KV lacks
  (``cache/handover.py``).
- ``Req``, attribute :data:`CONTINUED`: which cached positions of a prompt are approximate (``cache/tree/``).
- ``Req``, attribute :data:`DIGESTS`: digests of the beginnings of its prompt (``cache/continuations.py``).
- ``Req.customized_info``: what a response says that asked for a record (``plugin/report.py``).
- ``Req.last_node`` and prefix matches: a ``Composition`` in place of a node id (``cache/composition.py``).
- ``Req.last_node`` and prefix matches: a ``Continued`` in place of a node id (``cache/continuation.py``).
- ``Req.last_node``: a ``Restored`` in place of a node id (``cache/swap.py``).
- ``ForwardBatch.rids``: a ``MarkedRids`` in place of a list; says whether a forward needs our kernels.
- ``can_run_decode_cuda_graph`` of batches: a ``GraphVote`` in place of a bool.
- ``GetInternalStateReq.rid``: the HTTP path that says what is asked of a scheduler (``plugin/hooks.py``).
- ``Req.lock``: a ``CompositionLock`` with a lock for each path of a composition (``cache/composition.py``);
  a ``ContinuedLock`` with the continuations that the request reads (``cache/tree/base.py``).
- The wrapper of a hybrid model's backends: the method ``can_run_prefill_cuda_graph`` of our backend
  (``plugin/hooks.py``).
- ``TokenizerManager``, attribute :data:`COMPOSES`: whether schedulers compose prompts
  (``plugin/documents.py``).
- ``TokenizerManager``, attribute :data:`FINDER`: what finds documents that are not marked
  (``plugin/documents.py``).
- ``TokenizerManager``, attribute :data:`WAITING`: requests whose documents are prefilled
  (``plugin/waiting.py``).
"""

#: Attribute of ``ServerArgs``: a ``ReasonCacheConfig``. Missing without ``--enable-reasoncache``.
CONFIG = "_reasoncache"
#: Attribute of ``Req``: a ``RequestRecord``. Missing until a poll sees the request.
RECORD = "_reasoncache_record"
#: Attribute of ``Req``: an ``Asked``. Missing until it is needed.
ASKED = "_reasoncache_asked"
#: Attribute of ``Req``: its ``CachedDocuments``, or None. Missing until the request is looked up.
DOCUMENTS = "_reasoncache_documents"
#: Attribute of ``Req``: a ``Swapped``, or None. Missing until the request is retracted.
SWAPPED = "_reasoncache_swapped"
#: Attribute of ``Req``: a ``Copied``, or None. Missing until a decode server of a PD pair retracts the request.
COPIED = "_reasoncache_copied"
#: Attribute of ``Req``: the positions ``(start, end)`` of its prompt that read what an earlier response shared,
#: or None. Missing until the request is prefilled.
CONTINUED = "_reasoncache_continued"
#: Attribute of ``Req``: its prompt, and a dict of digests by length. Missing until the request is looked up.
DIGESTS = "_reasoncache_digests"
#: Attribute of a weight: its version, and its packed form (``cpu/packed.py``). Missing until it is needed.
PACKED = "_reasoncache_packed"
#: Attribute of the tokenizer manager: bool. Missing until all schedulers have answered.
COMPOSES = "_reasoncache_composes"
#: Attribute of the tokenizer manager: a ``DocumentFinder``; None once it failed. Missing until it is needed.
FINDER = "_reasoncache_finder"
#: Attribute of the tokenizer manager: a list of ``WaitingRequest``. Missing until a request waits.
WAITING = "_reasoncache_waiting"
