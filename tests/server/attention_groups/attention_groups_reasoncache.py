# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: it makes DP attention run on a CPU. SGLang copies the hidden states of each
group of ranks into the batch of all groups with Triton; with this plugin SGLang uses PyTorch, like its CPU
engine. SGLang still decides what is gathered, and when."""


def register() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    # SGLang then uses PyTorch's collectives instead of operators that need CUDA.
    parallel_state._is_cpu = True
    # SGLang then uses no pinned memory, and asks our backend for the length of padding requests.
    forward_batch_info._is_cpu = True
    PagedCpuBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
