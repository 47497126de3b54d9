# SPDX-License-Identifier: Apache-2.0
"""Evicts positions of a running request: policies choose them, the controller frees their slots."""
