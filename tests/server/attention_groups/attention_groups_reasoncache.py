# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: runs on a CPU what DP attention does on a GPU. SGLang copies rows of a group
into the batch of all groups by Triton; its own CPU engine does so by PyTorch, which is used here. SGLang
still decides what is gathered, and when."""


def register() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    # Uses PyTorch's collectives in place of operators for CUDA alone.
    parallel_state._is_cpu = True
    # Uses no pinned memory. The next line: length of the rows that pad a group's batch.
    forward_batch_info._is_cpu = True
    PagedCpuBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
