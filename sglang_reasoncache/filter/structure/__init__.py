# SPDX-License-Identifier: Apache-2.0
"""Formal content of a step as labelled ordered trees (ReasonCache, stage 1). Text is read, never
evaluated, and every read is bounded."""
