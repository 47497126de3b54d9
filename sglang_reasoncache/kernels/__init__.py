# SPDX-License-Identifier: Apache-2.0
"""Kernels over a KV pool: plan (which slots a batch reads), attention, gather (copies), KV distance."""
