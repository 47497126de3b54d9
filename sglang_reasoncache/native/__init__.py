# SPDX-License-Identifier: Apache-2.0
"""The C++ library of ``csrc/``: compiled on first use, called through ctypes, which releases the
interpreter lock. Without a compiler PyTorch computes the same, slower."""

from sglang_reasoncache.native.build import NativeUnavailable, library, prepare_for_children

__all__ = ["NativeUnavailable", "library", "prepare_for_children"]
