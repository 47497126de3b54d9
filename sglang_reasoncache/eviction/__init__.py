# SPDX-License-Identifier: Apache-2.0
"""Giving up positions of a request: policies decide, the controller applies."""
