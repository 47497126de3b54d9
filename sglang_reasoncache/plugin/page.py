# SPDX-License-Identifier: Apache-2.0
"""Makes the page at ``GET /reasoncache/ui``, and cuts a response's text where sharing begins or ends."""

import asyncio
import base64
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse

#: A part is detokenized together with this many earlier tokens, so that its first characters come out right.
_BEFORE = 4


async def show() -> HTMLResponse:
    return _page()


@functools.cache
def _page() -> HTMLResponse:
    """Build the page. HTTP headers forbid all scripts but the page's own, and connections to other servers."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return HTMLResponse(text, headers=headers)


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


async def parts_of(response: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Cut a ``response`` (from ``Report.response``) into runs of tokens, each with its ``text``. A run's
    ``start`` and ``end`` are positions in prompt plus output. Position ``start + i`` reads the slot of position
    ``source + i`` of request ``rid``. ``source`` is null if the run reads no other position's slots. ``rid`` is
    null if the source is in this request. Runs are also cut where the source of another run begins or ends.
    ``tokenizer``: None with ``--skip-tokenizer-init``; texts are then the numbers of the tokens."""
    decode = _numbers if tokenizer is None else tokenizer.decode
    ids = response["output_ids"]
    first = response["prompt_tokens"]
    # Position -> the position that it reads, and the index of that position's request if it is another one.
    source = {
        dst + at: (src + at, *of)
        for _, dst, src, length, *of in (*response["blocks"], *response["blocks_across"])
        for at in range(length)
    }
    end = first + len(ids)
    cuts = {first, end}
    for at in range(first, end + 1):
        here = source.get(at)
        before = source.get(at - 1)
        if here and before and here == (before[0] + 1, *before[1:]):
            continue
        cuts |= {at} if here or before else set()
        # Cut where the source begins or ends, if the source is in this response.
        cuts |= {here[0]} if here and not here[1:] else set()
        cuts |= {before[0] + 1} if before and not before[1:] else set()
    bounds = sorted(cut for cut in cuts if first <= cut <= end)
    parts = []
    for start, stop in itertools.pairwise(bounds):
        # Yield to the event loop, which also streams to other clients.
        await asyncio.sleep(0)
        begin = start - first
        before = max(start - first - _BEFORE, 0)
        text = decode(ids[before : stop - first])
        text = text[len(decode(ids[before:begin])) :]
        read, *of = source.get(start, (None,))
        rid = response["sources"][of[0]] if of else None
        parts.append(dict(text=text, start=start, end=stop, source=read, rid=rid))
    return parts
