# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for tests of speculation without a GPU. It gives the CPU platform the operations for which
SGLang has kernels on a GPU only, and a draft model's attention. The verification is left to the platform's own
backend. Decides greedily: SGLang's samplers for drafted tokens are kernels too."""

import importlib
import sys
import types
from typing import Any

import torch
from torch import Tensor


def _read_tree(
    tree_mask: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    bs: int,
    draft_token_num: int,
) -> None:
    """Each node's position, first child and next sibling, from a mask of ancestors."""
    mask = tree_mask[: bs * draft_token_num**2].view(bs, draft_token_num, draft_token_num).bool()
    order = torch.arange(draft_token_num)
    above = mask & (order < order[:, None])
    positions.copy_((above.sum(-1) + seq_lens[:, None]).flatten())
    retrieve_index.copy_(torch.arange(bs * draft_token_num).view(bs, draft_token_num))
    parents = torch.where(above.any(-1), (above * order).amax(-1), -1).tolist()
    child = [[-1] * draft_token_num for _ in range(bs)]
    sibling = [[-1] * draft_token_num for _ in range(bs)]
    for request, of in enumerate(parents):
        for node in reversed(range(draft_token_num)):
            if of[node] >= 0:
                sibling[request][node] = child[request][of[node]]
                child[request][of[node]] = node
    retrieve_next_token.copy_(torch.tensor(child))
    retrieve_next_sibling.copy_(torch.tensor(sibling))


def _build_chain(
    parent_list: Any, top_scores_index: Any, seq_lens: Tensor, tree_mask: Any, positions: Tensor,
    retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, topk: int,
    spec_steps: int, draft_token_num: int, *_: Any,
) -> None:  # fmt: skip
    assert topk == 1
    positions.copy_((seq_lens[:, None] + torch.arange(draft_token_num)).flatten())
    retrieve_index.copy_(torch.arange(positions.numel()).view(-1, draft_token_num))
    retrieve_next_token[:] = -1
    retrieve_next_token[:, :-1] = torch.arange(1, draft_token_num)


def _slots_of_rows(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    **_: Any,
) -> Tensor:
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in bounds]).long()


def _slots_of_drafts(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor,
    topk: int, num_cols: int, *_: Any, **__: Any,
) -> None:  # fmt: skip
    ends = seq_lens + topk * num_cols
    out_cache_loc.copy_(_slots_of_rows(req_pool_indices, req_to_token, seq_lens, ends))


def _fill_rows(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor,
    out_cache_loc: Tensor, batch_size: int,
) -> None:  # fmt: skip
    at = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].int()
        at += end - start


def _fill_front(num_front: Tensor, out_cache_loc: Tensor, front: Tensor) -> None:
    window = out_cache_loc.view(num_front.numel(), -1)
    found = torch.cat([row[:n] for row, n in zip(window, num_front.tolist(), strict=True)])
    front[: len(found)] = found


def _fill_accepted(accept_index: Tensor, out_cache_loc: Tensor, accept_out: Tensor, _: int) -> None:
    picked = accept_index.flatten()
    picked = picked[picked >= 0].long()
    accept_out[: len(picked)] = out_cache_loc[picked]


def _fill_bonus(
    accept_tokens: Tensor, accept_lens: Tensor, out: Tensor, stride: int, batch_size: Any = None
) -> None:
    at = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    out.copy_(accept_tokens.flatten()[at])


def _verify(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_predict: Tensor, topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Walks down from each root while a child is the token that the model predicts."""
    for request in range(len(candidates)):
        node = count = 0
        accept_index[request, 0] = retrieve_index[request, 0]
        while True:
            wanted = int(target_predict[request, node])
            predicts[int(retrieve_index[request, node])] = wanted
            child = int(retrieve_next_token[request, node])
            while child >= 0 and int(candidates[request, child]) != wanted:
                child = int(retrieve_next_sibling[request, child])
            if child < 0 or count + 1 >= accept_index.shape[1]:
                break
            count += 1
            node = child
            accept_index[request, count] = retrieve_index[request, node]
        accept_token_num[request] = count
    return predicts, accept_index, accept_token_num


def _rotate_ids(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, newest: Tensor, picked: Tensor | None = None
) -> None:
    """Drops each request's first token, and puts its newest behind the last, or at ``picked``."""
    for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        window = input_ids[start : start + length]
        window[:-1] = window[1:].clone()
        at = start + length - 1 if picked is None else int(picked[request])
        if length:
            input_ids[at] = newest.flatten()[request]


def _move_kv(pool: Any, target: Tensor, source: Tensor) -> None:
    moved = target != source
    target = target[moved]
    source = source[moved]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[target] = buffer[source]


#: Module of SGLang -> its functions that are replaced.
_OPERATIONS: dict[str, dict[str, Any]] = {
    "sglang.kernels.ops.speculative.cache_locs": {
        "assign_draft_cache_locs_contiguous_func": _slots_of_drafts,
        "assign_extend_cache_locs_func": _slots_of_rows,
        "fill_front_out_cache_loc_func": _fill_front,
    },
    "sglang.kernels.ops.speculative.eagle": {
        "fill_accept_out_cache_loc_func": _fill_accepted,
        "fill_bonus_tokens_func": _fill_bonus,
    },
    "sglang.kernels.ops.speculative.spec_tree": {
        "verify_tree_greedy_func": _verify,
        "build_tree_kernel_efficient_func": _build_chain,
    },
    "sglang.kernels.ops.speculative.multi_layer_eagle": {"rotate_input_ids": _rotate_ids},
    "sglang.srt.mem_cache.allocation": {"assign_req_to_token_pool_func": _fill_rows},
}


class _DraftSteps:
    """A draft model's decode steps: step i reads a row's prefix and the i + 1 tokens drafted so far."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        from sglang_reasoncache.cpu.backend import PagedCpuBackend

        assert topk == 1
        self.attn_backends = [_named(PagedCpuBackend(runner)) for _ in range(steps - 1)]
        self._rows = runner.req_to_token_pool
        self._slots = self.attn_backends[0].paged._num_slots

    def init_forward_metadata(self, batch: Any) -> None:
        from sglang_reasoncache.kernels.plan import plan_rows

        for step, backend in enumerate(self.attn_backends):
            paged = backend.paged
            paged.forget()
            rows = self._rows.req_to_token
            which = batch.req_pool_indices
            ends = batch.seq_lens + step + 1

            def plan(reach: int, rows: Any = rows, which: Any = which, ends: Any = ends) -> Any:
                return plan_rows(rows, which, ends, num_slots=self._slots, reach=reach)

            paged.rows = plan(0)
            for reach in paged._reaches:
                paged.windows[reach] = plan(reach)
                if paged.has_window_pool:
                    paged.windows[reach] = paged._in_window_pool(paged.windows[reach])
            if paged.has_window_pool:
                paged._new_peers = paged._peers(rows[which, ends - 1].long())


def _named(backend: Any) -> Any:
    backend.prefill_attention_backend_str = "reasoncache_cpu"
    backend.decode_attention_backend_str = "reasoncache_cpu"
    return backend


def register() -> None:
    # SGLang imports this module, but a CPU lacks the packages that it needs.
    tree = types.ModuleType("sglang.kernels.ops.speculative.reconstruct_tree")
    tree.reconstruct_indices_from_tree_mask_func = _read_tree  # type: ignore[attr-defined]
    sys.modules[tree.__name__] = tree
    replaced: dict[int, tuple[str, Any]] = {}
    for name, functions in _OPERATIONS.items():
        module = importlib.import_module(name)
        for function, ours in functions.items():
            replaced[id(getattr(module, function))] = function, ours
            setattr(module, function, ours)
    # Other modules have imported these functions by name.
    for module in [each for each in sys.modules.values() if isinstance(each, types.ModuleType)]:
        if module.__name__.startswith("sglang."):
            for function, ours in replaced.values():
                if function in vars(module):
                    setattr(module, function, ours)

    # DeepSeek's draft model waits for the GPU when it takes the served model's embeddings.
    torch.cuda.synchronize = lambda *_: None
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_reasoncache.cpu.backend import PagedCpuBackend
    from sglang_reasoncache.cpu.platform import TorchCpuPlatform

    MHATokenToKVPool._move_kv_cache_impl = _move_kv
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda _: None
    platform: Any = TorchCpuPlatform
    platform.supports_speculative_algorithm = lambda *_: True
    platform.supports_speculative_draft_attention_backend = lambda *_: True
    platform.get_default_speculative_draft_attention_backend = lambda *_: "reasoncache_cpu"

    def decode(factory: Any) -> Any:
        steps = factory.speculative_num_steps
        return _named(_DraftSteps(factory.draft_model_runner, factory.topk, steps))

    DraftBackendFactory.create_decode_backend = decode
    DraftBackendFactory.create_draft_extend_backend = lambda factory: _named(
        PagedCpuBackend(factory.draft_model_runner)
    )
