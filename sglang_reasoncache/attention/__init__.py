# SPDX-License-Identifier: Apache-2.0
"""Attention where several positions may use one KV slot. The slot's key can be rotated to each of them."""
