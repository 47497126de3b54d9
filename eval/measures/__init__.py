# SPDX-License-Identifier: Apache-2.0
"""Computes figures of evaluation runs from the runs' records."""
