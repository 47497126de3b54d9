# SPDX-License-Identifier: Apache-2.0
"""Runs tasks of lm-evaluation-harness and our own tasks with a model whose answers come from a server."""
