# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: it makes DP attention run on a CPU. SGLang copies hidden
states between a group's batch and the batch of all groups with a Triton kernel. With this plugin, SGLang uses
its PyTorch code for CPUs instead. SGLang still decides what is gathered, and when."""

from typing import Any


def register() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    from sglang_reasoncache.cpu.backend import PagedCpuBackend

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    # With this flag SGLang uses PyTorch's collectives instead of operators that need CUDA.
    parallel_state._is_cpu = True
    # On a decode server of a PD pair this collective has only an operator that needs CUDA.
    groups: Any = parallel_state.GroupCoordinator
    groups.all_to_all_single = groups._all_to_all_single
    # With this flag SGLang pins no memory, and calls the method below for the length of padding requests.
    forward_batch_info._is_cpu = True
    PagedCpuBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
