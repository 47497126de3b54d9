# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: its own task files and ours, and a model whose answers come from a server."""
