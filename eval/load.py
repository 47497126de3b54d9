# SPDX-License-Identifier: Apache-2.0
"""Sends problems to a server through the official OpenAI client: streaming, all in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI, OpenAIError


@dataclass(frozen=True)
class Answer:
    """One streamed response. Times in seconds on the monotonic clock.

    Attributes:
        request_id: The server's id of the request.
        text: Everything that was streamed.
        output_tokens: Counted by the server.
        started: When the request was sent.
        first_token: When the first text arrived, None if none did.
        ended: When the stream closed.
        error: What went wrong, None for a complete response.
    """

    request_id: str
    text: str
    output_tokens: int
    started: float
    first_token: float | None
    ended: float
    error: str | None = None


async def ask(
    client: AsyncOpenAI, model: str, prompt: str, max_tokens: int, extra: dict[str, object]
) -> Answer:
    """One greedy chat completion; a failure is returned, not raised."""
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    request_id, tokens, error = "", 0, None
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        async for chunk in stream:
            request_id = chunk.id or request_id
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    first = first or time.monotonic()
                    pieces.append(choice.delta.content)
    except OpenAIError as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Answer(request_id, "".join(pieces), tokens, started, first, time.monotonic(), error)


async def ask_all(
    client: AsyncOpenAI,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    done: Callable[[Answer], None],
    extra: dict[str, object] | None = None,
) -> list[Answer]:
    """All prompts at once, in order of the list; ``done`` is called as each ends."""

    async def one(prompt: str) -> Answer:
        answer = await ask(client, model, prompt, max_tokens, extra or {})
        done(answer)
        return answer

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
