# SPDX-License-Identifier: Apache-2.0
"""Decodes recorded responses in a real server by forcing each next token."""
