# SPDX-License-Identifier: Apache-2.0
"""Finds pairs of blocks that may share KV slots, with Python and numpy in a separate process. The filter
only proposes pairs. ``sharing/`` checks rows and slots."""
