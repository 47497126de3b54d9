# SPDX-License-Identifier: Apache-2.0
"""One Python function per operation on the KV pool."""
