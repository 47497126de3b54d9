# SPDX-License-Identifier: Apache-2.0
"""Decode attention that reads a part of each row, chosen anew in every step and layer."""
