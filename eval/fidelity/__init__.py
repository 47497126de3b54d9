# SPDX-License-Identifier: Apache-2.0
"""Measures how sharing and eviction change a model's predictions; see docs/fidelity.md."""
