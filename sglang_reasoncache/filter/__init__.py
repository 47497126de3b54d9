# SPDX-License-Identifier: Apache-2.0
"""Which finished reasoning steps may share memory with which earlier ones: Python and numpy, in a
process of its own. It only proposes; whoever applies a proposal checks the cache's state."""
