# SPDX-License-Identifier: Apache-2.0
"""Errors of several packages."""


class CannotShare(ValueError):
    """The KV of this model, or of this model with these flags, cannot be shared. The server starts all the
    same, unless a policy is to evict (``plugin/unshared.py``)."""
