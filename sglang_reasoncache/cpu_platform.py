# SPDX-License-Identifier: Apache-2.0
"""A platform on which a stock SGLang server runs without a GPU, for tests and the demo."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_reasoncache.compat import ATTENTION_FIELDS


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU without SGLang's CPU kernel package: operators are torch's, but for attention."""

    _enum = PlatformEnum.OOT
    # With Triton declared, the paged allocator would launch its kernels on CPU tensors.
    capabilities = PlatformCapabilities(supports_triton=False)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """The attention backend, where the operator named none."""
        from sglang_reasoncache.plugin import cpu_attention

        # SGLang has settled on one by now.
        given = getattr(server_args, "_raw_input", None) or {}
        if not any(given.get(name) for name in ATTENTION_FIELDS):
            server_args.attention_backend = cpu_attention.default_backend()

    def is_pin_memory_available(self, device: object = None) -> bool:
        """There is no device to pin host memory for."""
        return False
