# SPDX-License-Identifier: Apache-2.0
"""Recorded responses decoded through a real server, each next token forced."""
