# SPDX-License-Identifier: Apache-2.0
"""The filter: a separate process, without torch, that finds pairs of *blocks* (runs of tokens, 8 by default)
whose KV slots may be shared. It only proposes pairs; ``sharing/`` checks each pair's block tables and slots."""
