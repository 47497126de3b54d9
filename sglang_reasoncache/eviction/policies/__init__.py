# SPDX-License-Identifier: Apache-2.0
"""Cache policies over a request's row: which positions to give up. See docs/eviction.md."""
