# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of a test: what DP attention needs of a GPU, on a CPU. SGLang copies rows of a group
into the batch of all groups in Triton, and has the same in PyTorch for its own CPU engine. What is
gathered, and when, stays SGLang's."""


def register() -> None:
    from sglang.srt.layers import dp_attention

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
