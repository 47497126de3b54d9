# SPDX-License-Identifier: Apache-2.0
"""Repeated tokens of a response share KV memory inside a live SGLang server.

Importing this package changes nothing. SGLang loads :func:`sglang_reasoncache.plugin.register`, which adds
command-line flags; everything else is installed when ``--enable-reasoncache`` is given.
"""

__version__ = "0.1.0"
