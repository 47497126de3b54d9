# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a response may share memory with which others: Python and numpy, in a
process of its own. It only proposes; whoever applies a proposal checks the cache's state."""
