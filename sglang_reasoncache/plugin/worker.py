# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP application, with our hooks and paths, in a worker process of ``--tokenizer-worker-num``.
SGLang loads no plugins in these processes, so this module does. SGLang imports it, because ``flags.attach``
names it in the variable ``compat.APP_ENV``."""

import os

from sglang_reasoncache import compat
from sglang_reasoncache.plugin import flags, hooks, routes

compat.load_plugins()
if os.environ.get(flags.ENABLED_ENV) == "1":
    hooks.install_frontend()
    routes.add()
app = compat.http_app
