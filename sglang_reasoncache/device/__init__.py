# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that do not wait, reductions over the ranks, free host memory."""
