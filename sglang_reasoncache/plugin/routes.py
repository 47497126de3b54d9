# SPDX-License-Identifier: Apache-2.0
"""``GET /reasoncache``: what sharing did, as JSON, one entry per scheduler."""

from __future__ import annotations

from typing import Any

from sglang_reasoncache import compat

PATH = "/reasoncache"


def install() -> None:
    """Add the route to SGLang's HTTP application. Called in the server's main process."""
    if not any(getattr(route, "path", None) == PATH for route in compat.http_app.routes):
        compat.http_app.add_api_route(PATH, _report, methods=["GET"])


async def _report() -> dict[str, Any]:
    # Scheduler state travels the way /server_info already gets it.
    states = await compat.http_global_state().tokenizer_manager.get_internal_state()
    return {"schedulers": [state.get("reasoncache") for state in states]}
