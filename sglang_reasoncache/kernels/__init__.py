# SPDX-License-Identifier: Apache-2.0
"""Kernels for a KV pool: they plan which slots a batch reads, attend to slots, copy them and compare them."""
