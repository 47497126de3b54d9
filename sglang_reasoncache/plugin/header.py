# SPDX-License-Identifier: Apache-2.0
"""The HTTP header by which a request opts out, in the process that serves HTTP. SGLang's Responses, Anthropic
and Ollama APIs drop ``custom_params``; every API hands the HTTP request on to ``generate_request``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException, Request
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection

from sglang_reasoncache import compat
from sglang_reasoncache.custom_params import HEADER, OPT_OUT_KEY, ROUTED_HEADER, header_value

#: Methods of the requests that generate, except for the probe ``GET /health_generate``.
_METHODS = frozenset(("POST", "PUT"))
#: The names as ASGI servers hand them on.
_NAMES = frozenset(name.lower().encode() for name in (HEADER, ROUTED_HEADER))


def apply(manager: Any, obj: Any, request: Any) -> None:
    """Put what the header of ``request`` says into the sampling parameters of ``obj``, unless these say
    something themselves. Raises ValueError for a wrong value. Parameters of the caller stay as they are."""
    if not isinstance(request, HTTPConnection) or not isinstance(obj, compat.GenerateReqInput):
        return
    value = header_value(_lines(request.scope))
    if value is None:
        return
    # SGLang replaces these defaults as a whole by a request's ``custom_params``.
    defaults = (manager.preferred_sampling_params or {}).get("custom_params")
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [_with(each, value, defaults) for each in params]
    else:
        obj.sampling_params = _with(params, value, defaults)


def _with(params: Any, value: object, defaults: Any) -> Any:
    """A copy of ``params`` with ``value``. SGLang refuses what is no object, so that is handed on."""
    if not isinstance(params, dict | None):
        return params
    params = params or {}
    custom = params.get("custom_params", defaults)
    if not isinstance(custom, dict | None):
        return params
    custom = custom or {}
    if "custom_params" in params and custom.get(OPT_OUT_KEY) is not None:
        return params
    return {**params, "custom_params": {**custom, OPT_OUT_KEY: value}}


def _lines(scope: Mapping[str, Any]) -> list[str]:
    """The lines of our header. None of a probe: a wrong header must not take a replica out of service."""
    if scope.get("method") not in _METHODS:
        return []
    return [value.decode("latin-1") for name, value in scope["headers"] if name in _NAMES]


class HeaderCheck:
    """ASGI middleware. Answers a wrong header with status 400 before any API sees the request: some would begin
    a stream or a background response first, and Ollama's would answer with status 500."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._app
        if scope["type"] == "http":
            try:
                header_value(_lines(scope))
            except ValueError as error:
                answer = await _refusal(Request(scope), HTTPException(400, str(error)))
        await answer(scope, receive, send)


async def _refusal(request: Request, error: HTTPException) -> Any:
    """SGLang's answer to the exception, in the form of the API that the path belongs to."""
    handlers = compat.http_app.exception_handlers
    kind = next(kind for kind in HTTPException.__mro__ if kind in handlers)
    return await handlers[kind](request, error)


def add_check() -> None:
    """Let SGLang's HTTP application check the header, behind its own middleware: keys are checked first."""
    middleware = compat.http_app.user_middleware
    if not any(each.cls is HeaderCheck for each in middleware):
        middleware.append(Middleware(HeaderCheck))
