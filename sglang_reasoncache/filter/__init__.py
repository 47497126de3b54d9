# SPDX-License-Identifier: Apache-2.0
"""Finds pairs of *blocks* (runs of tokens, 8 by default) that may share KV slots, in a separate process
without torch. The filter only proposes pairs. ``sharing/`` checks them against block tables and slots."""
