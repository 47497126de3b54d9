# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP application, with our hooks and paths, in a worker process of ``--tokenizer-worker-num``. These
processes load no plugins. SGLang imports this module there, because the plugin's main process names it in the
variable ``compat.APP_ENV``."""

import os

from sglang_reasoncache import compat
from sglang_reasoncache.plugin import flags, hooks, routes

compat.load_plugins()
if os.environ.get(flags.ENABLED_ENV) == "1":
    hooks.install_frontend()
    routes.add()
app = compat.http_app
