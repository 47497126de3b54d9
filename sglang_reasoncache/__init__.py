# SPDX-License-Identifier: Apache-2.0
"""Similar reasoning steps share KV memory inside a live SGLang server.

Importing this package changes nothing: SGLang loads
:func:`sglang_reasoncache.plugin.register` through its plugin entry point, and
that adds command-line flags only. Everything else is installed when
``--enable-reasoncache`` is given.
"""

__version__ = "0.1.0"
