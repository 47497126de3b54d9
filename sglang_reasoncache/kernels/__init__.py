# SPDX-License-Identifier: Apache-2.0
"""Kernels that read the KV pool: attention, the plan of rows, gather, KV distance."""
