# SPDX-License-Identifier: Apache-2.0
"""Sends a run's requests through the official OpenAI client, streaming, with the client's own retries off."""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from eval.runs.folder import Response

MAX_CHARACTERS = 4_000_000  # in a response; a longer response is cut off and counts as failed


@dataclass(frozen=True)
class Request:
    """A problem to send. ``body`` adds fields to the request; its ``messages``, if set, replace ``prompt``."""

    problem_id: str
    prompt: str
    body: Mapping[str, Any] = field(default_factory=dict)


#: Called in the event loop's thread after each attempt to get a response, successful or not.
Ended = Callable[[Response], None]


def connect(url: str, timeout_s: float) -> AsyncOpenAI:
    """A client of the server at ``url`` (without ``/v1``) for any number of requests at a time. Connecting may
    take 60 s. Then the server may be silent for ``timeout_s``, as a request may wait hours for KV slots."""
    # Each connection is an open file, and many systems allow 1,024 unless a process asks for more.
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    timeout = httpx.Timeout(timeout_s, connect=60.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # With trust_env=False, httpx ignores proxies that the environment sets.
    http = DefaultAsyncHttpxClient(trust_env=False, limits=limits, timeout=timeout)
    how: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "http_client": http}
    return AsyncOpenAI(base_url=f"{url}/v1", timeout=timeout, **how)


async def send(client: AsyncOpenAI, model: str, request: Request, began: float) -> Response:
    """Ask for a chat completion. Errors are recorded in the response, not raised. ``began`` is time 0."""
    started = time.monotonic() - began
    first: float | None = None
    thoughts = text = ""
    prompt_tokens = output_tokens = 0
    request_id = ""
    reason = ""
    error = None
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": request.prompt}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dict(request.body),
        )
        async with stream:
            async for chunk in stream:
                request_id = chunk.id or request_id
                if chunk.usage is not None:
                    prompt_tokens = chunk.usage.prompt_tokens
                    output_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    # With --reasoning-parser SGLang streams the reasoning in a separate field.
                    reasoning = getattr(choice.delta, "reasoning_content", None)
                    thoughts += reasoning if isinstance(reasoning, str) else ""
                    text += choice.delta.content or ""
                size = len(thoughts) + len(text)
                if first is None and size:
                    first = time.monotonic() - began
                if size > MAX_CHARACTERS:
                    error = f"the response has more than {MAX_CHARACTERS} characters"
                    break
    except (OpenAIError, httpx.HTTPError, ValueError) as problem:
        # A stream that breaks off raises httpx.HTTPError. A chunk that is not JSON raises ValueError.
        error = f"{type(problem).__name__}: {problem}"[:2000]
    if error is None and reason in ("", "abort"):
        error = "the server aborted it" if reason else "the stream ended without a finish reason"
    return Response(
        problem_id=request.problem_id, request_id=request_id,
        text=f"<think>{thoughts}</think>{text}" if thoughts else text, prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, started=started, first_token=first,
        ended=time.monotonic() - began, finish_reason=reason, error=error,
    )  # fmt: skip


async def send_all(
    url: str, model: str, requests: Sequence[Request], ended: Ended, timeout_s: float,
    in_flight: int | None = None, attempts: int = 1,
) -> None:  # fmt: skip
    """Send all requests, at most ``in_flight`` at a time; a request that fails is sent up to ``attempts``
    times. ``ended`` is called for every attempt."""
    gate = asyncio.Semaphore(in_flight or max(len(requests), 1))

    async def send_request(client: AsyncOpenAI, request: Request, began: float) -> None:
        async with gate:
            for _ in range(attempts):
                response = await send(client, model, request, began)
                ended(response)
                if response.error is None:
                    return

    try:
        async with connect(url, timeout_s) as client, asyncio.TaskGroup() as group:
            began = time.monotonic()
            for request in requests:
                group.create_task(send_request(client, request, began))
    except ExceptionGroup as several:
        # ``ended`` raised an exception, for one request or for several. Only the first is raised again.
        raise several.exceptions[0] from several
