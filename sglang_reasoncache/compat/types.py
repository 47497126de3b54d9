# SPDX-License-Identifier: Apache-2.0
"""Types of SGLang's objects, with only the attributes that this project reads or writes.

The types are static: nothing is checked at run time. ``tests/contract/test_compat.py`` looks up every
attribute in the matching class of the installed SGLang.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class RequestKV(Protocol):
    req_pool_idx: int
    kv_allocated_len: int
    #: Number of positions whose KV is written, or will have been once a transfer ends.
    kv_committed_len: int
    #: The prefix tree owns the slots of the first ``cache_protected_len`` positions.
    cache_protected_len: int
    holds_kv: bool
    #: SGLang's own copy of a retracted request's KV on the host, on the decode server of a PD pair.
    retraction_backup: Any
    #: How many positions the latest copy of the request's state has seen, in models with state layers.
    mamba_last_track_seqlen: int | None
    #: The request's slot in the pool of states, a scalar on the device, and whether there is one.
    mamba_pool_idx: torch.Tensor | None
    holds_mamba: bool
    #: The state with which a new request begins, int64 ``[1]`` on the device: the next forward copies it.
    mamba_cow_src_index: torch.Tensor | None
    #: Whether the next forward clears the request's state.
    mamba_needs_clear: bool


class Request(Protocol):
    rid: str
    #: What SGLang names the request by when it tells the prefix cache of its end.
    cache_request_handle: Any
    kv: RequestKV
    #: SGLang's ``TreeLock`` of the request's prefix, or one of ours (``cache/tree/base.py``).
    lock: Any
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    sampling_params: Any
    finished_reason: Any
    is_retracted: bool
    retraction_count: int
    to_finish: Any
    beam_group: Any
    multimodal_inputs: Any
    input_embeds: Any
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None
    skip_radix_cache_insert: bool
    #: Whether log-probabilities are returned, and the first position of the prompt for which; -1: none.
    return_logprob: bool
    logprob_start_len: int
    return_hidden_states: bool
    #: The output up to where a stop condition cut it.
    output_ids_through_stop: Sequence[int]
    #: More to send with the response: for each key a value for each output token.
    customized_info: dict[str, list[Any]] | None
    #: The id of a node of the prefix tree, or what takes its place (``compat/carriers.py``).
    last_node: Any
    #: How many positions of the request a prefill need not compute.
    prefix_len: int

    def finished(self) -> bool: ...
    def offload_kv_cache(self, rows: Any, allocator: Any) -> None: ...
    def load_kv_cache(self, rows: Any, allocator: Any) -> None: ...


class KVPool(Protocol):
    """Buffers are ``[slots, heads, head_dim]``."""

    dtype: torch.dtype
    size: int
    page_size: int
    start_layer: int
    layer_num: int
    head_num: int
    head_dim: int
    kv_cache_layout: str
    is_quantized_kv_cache: bool
    set_kv_buffer: Callable[..., None]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_cpu_copy(self, indices: torch.Tensor) -> Any: ...
    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor) -> None: ...


class ReqToTokenPool(Protocol):
    """A row of slots for each running request."""

    #: int32 ``[max_requests, max_context]``.
    req_to_token: torch.Tensor
    #: int64 ``[max_requests]`` in host memory: how often each row has been given to a request.
    req_generation: torch.Tensor
    #: Number of rows, and how many of these no request has.
    size: int

    def available_size(self) -> int: ...
    def write(self, indices: Any, values: torch.Tensor) -> None: ...


class SlotAllocator(Protocol):
    size: int
    page_size: int
    dtype: torch.dtype
    device: str | torch.device
    need_sort: bool

    def get_kvcache(self) -> KVPool: ...
    def available_size(self) -> int: ...


class PrefixTree(Protocol):
    req_to_token_pool: ReqToTokenPool

    def evictable_size(self) -> int: ...
    def evict_for_alloc(self, params: Any) -> Any: ...


class ServerArgs(Protocol):
    """The flags as the operator gave them. SGLang does not overwrite them with the values that it resolves."""

    model_path: str
    served_model_name: str | None
    reasoning_parser: str | None
    radix_cache_backend: str | None
    attention_backend: str | None
    page_size: int | None
    speculative_algorithm: str | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    admin_api_key: str | None
    lora_paths: Any
    enable_lora: bool | None
    speculative_draft_attention_backend: str | None
    triton_attention_split_tile_size: int | None
    enable_mixed_chunk: bool
    enable_deterministic_inference: bool
    rl_on_policy_target: str | None
    moe_a2a_backend: str
    moe_dense_tp_size: int | None
    enable_hierarchical_cache: bool
    #: ``decode`` or ``prefill`` for a server of a PD pair, else ``null``.
    disaggregation_mode: str
    disaggregation_decode_host_receive_threshold: float
    tp_size: int
    pp_size: int
    dp_size: int
    nnodes: int


class ModelConfig(Protocol):
    context_len: int
    is_encoder_decoder: bool


class ModelRunner(Protocol):
    model: torch.nn.Module
    model_config: ModelConfig
    server_args: ServerArgs
    dtype: torch.dtype
    device: str
    forward_stream: Any
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    token_to_kv_pool_allocator: Any
    prefill_attention_backend_str: str
    decode_attention_backend_str: str
    is_draft_worker: bool
    is_generation: bool
    use_mla_backend: bool
    sliding_window_size: int | None
    spec_algorithm: Any
    init_new_workspace: bool
    attn_backend: Any


class AttentionLayer(Protocol):
    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    logit_capping_method: str
    sliding_window_size: int | None
    is_cross_attention: bool
    attn_type: Any
    pos_encoding_mode: str
    xai_temperature_len: int
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_scale_float: float | None
    v_scale_float: float | None


class ForwardMode(Protocol):
    def is_idle(self) -> bool: ...
    def is_decode(self) -> bool: ...
    def is_decode_or_idle(self) -> bool: ...
    def is_target_verify(self) -> bool: ...


class VerifyInput(Protocol):
    """The drafted tokens that a forward verifies, by a draft model or by n-grams."""

    #: Number of drafted tokens of each request.
    draft_token_num: int
    #: Whether they may form a tree: 1 if they form a chain.
    tree_topk: int
    #: What each token sees of its row and of the drafted tokens, bool. A chain may have none.
    custom_mask: torch.Tensor


class ForwardBatch(Protocol):
    """One forward. Lengths and indices are ``[batch]``. Fields that end in ``_cpu`` are on the host."""

    forward_mode: ForwardMode
    batch_size: int
    rids: Sequence[str] | None
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    extend_seq_lens_cpu: Any
    extend_prefix_lens_cpu: Any
    #: The slots to which this forward writes KV, ``[tokens]``.
    out_cache_loc: torch.Tensor
    positions: torch.Tensor
    mrope_positions: torch.Tensor | None
    #: A ``GraphVote`` once the groups of DP attention have voted on the graph to run, else a bool.
    can_run_decode_cuda_graph: bool
    #: Drafted tokens, in the mode TARGET_VERIFY: a ``VerifyInput``.
    spec_info: Any


class ScheduleBatch(Protocol):
    reqs: list[Any]
    decoding_reqs: list[Any] | None
    prefix_lens: list[int]
    extend_lens: list[int]
    tree_cache: Any
    seq_lens_cpu: torch.Tensor
    req_pool_indices: torch.Tensor
    batch_is_full: bool
    device: str
    req_to_token_pool: ReqToTokenPool
    #: The token ids of a prefill, int64 ``[tokens]`` in host memory.
    prefill_input_ids_cpu: torch.Tensor


class PreallocQueue(Protocol):
    """On the decode server of a PD pair: requests whose KV needs slots, because another server prefills them
    (``queue``) or because they were retracted (``retracted_queue``)."""

    queue: list[Any]
    retracted_queue: list[Any]
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    #: How many slots SGLang reserves for the output of each request.
    num_reserved_decode_tokens: int

    scheduler: Any
    #: Requests whose prompts' KV is being transferred.
    transfer_queue: Any

    def _active_req_count(self, extra_reserved_reqs: int = 0) -> int: ...
    def _active_reserved_tokens(
        self, n_active: int | None = None, extra_reserved_reqs: int = 0
    ) -> int: ...
    def _need_space_for_single_req(self, retractable_tokens: int | None = None) -> int: ...
    def _radix_full_evictable(self) -> int: ...


class CacheInitParams(Protocol):
    page_size: int
    enable_metrics: bool
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: Any
    tp_cache_group: Any
    #: None without windows in a pool of their own.
    sliding_window_size: Any


class TpWorker(Protocol):
    model_runner: ModelRunner
    tokenizer: Any


class TreeCacheBuildContext(Protocol):
    """What SGLang hands to the factory of a prefix cache."""

    server_args: ServerArgs
    params: CacheInitParams
    model_config: ModelConfig
    tp_worker: TpWorker
    tp_size: int
    tp_rank: int
    tp_group: Any
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    is_dsa: bool
    enable_hierarchical_cache: bool
