# SPDX-License-Identifier: Apache-2.0
"""An SGLang platform that runs a server without a GPU, for tests and the demo."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_reasoncache.compat import ATTENTION_FIELDS


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without SGLang's CPU kernels. PyTorch runs the model; our C++ attention is used if it compiles."""

    _enum = PlatformEnum.OOT
    # If this platform declared Triton, the paged allocator would launch Triton kernels on CPU tensors.
    capabilities = PlatformCapabilities(supports_triton=False)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose the attention backend if the user named none."""
        from sglang_reasoncache.cpu import attention

        # By now ``server_args`` holds SGLang's choice. ``_raw_input`` holds what the user chose.
        given = getattr(server_args, "_raw_input", None) or {}
        if not any(given.get(name) for name in ATTENTION_FIELDS):
            server_args.attention_backend = attention.default_backend()

    def is_pin_memory_available(self, device: object = None) -> bool:
        """False, because there is no device to pin host memory for."""
        return False
