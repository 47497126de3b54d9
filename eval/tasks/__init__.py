# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: task files of ours beside its own, and a model that asks a server."""
