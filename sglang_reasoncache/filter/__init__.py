# SPDX-License-Identifier: Apache-2.0
"""Which finished reasoning steps may share memory with which earlier ones.

Pure Python and numpy: no SGLang, no torch. The policy only proposes; whoever
applies a proposal checks it against the state of the cache.
"""
