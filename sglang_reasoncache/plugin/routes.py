# SPDX-License-Identifier: Apache-2.0
"""``GET /reasoncache`` and the paths below it: the process that serves HTTP asks, the schedulers answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Depends, HTTPException, Request

from sglang_reasoncache import compat
from sglang_reasoncache.plugin.build import build

if TYPE_CHECKING:
    from sglang_reasoncache.plugin.controller import Controller
    from sglang_reasoncache.plugin.unshared import Unshared

# HTTP paths. To say what is requested, ``_schedulers`` sends such a path to the schedulers as ``rid``.
#: JSON: the totals of each scheduler. The other paths begin with this one.
TOTALS = "/reasoncache"
#: JSON: each scheduler's totals and last finished requests.
DETAILS = "/reasoncache/details"
#: A web page that shows what the other paths return.
PAGE = "/reasoncache/ui"
#: JSON: a single response.
RESPONSE = "/reasoncache/response"
#: Sent to the schedulers like a path, to request details without lists of shared blocks and evicted positions.
BRIEF = DETAILS + "?blocks=false"


def add() -> None:
    """Add the paths to SGLang's HTTP application, and the check of our header. Details and responses show other
    clients' requests, so reading them requires the ``--admin-api-key`` if the server has one."""
    from sglang_reasoncache.plugin import header, page

    header.add_check()
    present = {getattr(route, "path", None) for route in compat.http_app.routes}
    for_admins = compat.auth_level(compat.AuthLevel.ADMIN_OPTIONAL)
    endpoints = {
        TOTALS: _totals,
        PAGE: page.show,
        DETAILS: for_admins(_details),
        RESPONSE: for_admins(_response),
    }
    for path, endpoint in endpoints.items():
        if path not in present:
            checks = [Depends(_check_key)] if endpoint in (_details, _response) else []
            compat.http_app.add_api_route(path, endpoint, methods=["GET"], dependencies=checks)


def _check_key(request: Request) -> None:
    """Raises HTTPException without the ``--admin-api-key``. SGLang checks it, but not in the worker processes
    of ``--tokenizer-worker-num``."""
    decision = compat.decide_request_auth(
        # SGLang's function lets some methods and paths pass, which a prefix of a proxy might resemble.
        method="GET",
        path=DETAILS,
        authorization_header=request.headers.get("Authorization"),
        api_key=None,
        admin_api_key=compat.http_global_state().tokenizer_manager.server_args.admin_api_key,
        auth_level=compat.AuthLevel.ADMIN_OPTIONAL,
    )
    if not decision.allowed:
        raise HTTPException(decision.error_status_code, "Unauthorized")


def answer(controller: Controller | Unshared, path: str) -> dict[str, Any] | None:
    """A scheduler's answer to ``path``, as JSON. A response is None if this scheduler keeps no copy of it. A
    path that is none of ours is answered with the totals."""
    if path.startswith(RESPONSE):
        return controller.response(path.removeprefix(RESPONSE + "/"))
    return controller.describe(path in (DETAILS, BRIEF), blocks=path != BRIEF)


async def _totals() -> dict[str, Any]:
    return _answered(await _schedulers(TOTALS))


async def _details(blocks: bool = True) -> dict[str, Any]:
    return _answered(await _schedulers(DETAILS if blocks else BRIEF))


def _answered(schedulers: list[Any]) -> dict[str, Any]:
    return {"build": build(), "schedulers": schedulers}


async def _response(rid: str) -> dict[str, Any]:
    """JSON of a finished response. ``parts``: see ``page.parts_of``; null if no scheduler keeps a copy."""
    from sglang_reasoncache.plugin import page

    entry = next(filter(None, await _schedulers(f"{RESPONSE}/{rid}")), None)
    tokenizer = compat.http_global_state().tokenizer_manager.tokenizer
    return {"rid": rid, "parts": None if entry is None else await page.parts_of(entry, tokenizer)}


async def _schedulers(path: str) -> list[Any]:
    """Ask every scheduler for our entry in its internal state, as ``/server_info`` asks for that state."""
    manager = compat.http_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    request = compat.GetInternalStateReq(rid=path)
    answers = await manager.get_internal_state_communicator(request)
    return [answer.internal_state.get("reasoncache") for answer in answers]
