# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of a test: what DP attention needs of a GPU, on a CPU. SGLang copies rows of a group
into the batch of all groups in Triton, and has the same in PyTorch for its own CPU engine. What is
gathered, and when, stays SGLang's."""


def register() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    # Collectives of PyTorch in place of operators that CUDA alone has.
    parallel_state._is_cpu = True
    # No pinned memory; and the length of the rows with which it pads the batch of a group.
    forward_batch_info._is_cpu = True
    PagedCpuBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
