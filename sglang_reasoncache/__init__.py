# SPDX-License-Identifier: Apache-2.0
"""Repeated tokens of a response share KV memory inside a live SGLang server.

Importing this package changes nothing. SGLang calls :func:`sglang_reasoncache.plugin.register`, which adds
flags and, on our CPU platform for tests, an attention backend. ``--enable-reasoncache`` installs the rest.
"""

__version__ = "0.1.0"
