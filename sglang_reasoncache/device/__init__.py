# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that do not wait, and reductions over the tensor-parallel ranks."""
