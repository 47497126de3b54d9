# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: DP attention on a CPU. SGLang copies a group's rows into the batch of all groups
with Triton; this plugin makes it use PyTorch, as SGLang's CPU engine does. SGLang still decides what is
gathered, and when."""


def register() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    # Uses PyTorch's collectives instead of operators that need CUDA.
    parallel_state._is_cpu = True
    # Uses no pinned memory. The next line sets the length of rows that pad a group's batch.
    forward_batch_info._is_cpu = True
    PagedCpuBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
