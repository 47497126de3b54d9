# SPDX-License-Identifier: Apache-2.0
"""Stateful property test of allocator, prefix tree and sharing together."""
