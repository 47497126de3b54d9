# SPDX-License-Identifier: Apache-2.0
"""Reads what a client sends in ``custom_params``: whether the request shares, and which parts of the prompt
are documents. A document is prefilled once for all prompts with equal text before the first document. A header
says whether the request shares where SGLang's API has no ``custom_params``."""

import dataclasses
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_reasoncache.compat.carriers import ASKED
from sglang_reasoncache.compat.types import Request

#: The key by which a request opts out of everything that the plugin does, or asks for a record of it.
OPT_OUT_KEY = "reasoncache"
#: The HTTP header that may have the same value, its name where SGLang's router is in front (which forwards few
#: names, and those that begin so), and the most characters of it that are read.
HEADER = "X-Reasoncache"
ROUTED_HEADER = "X-Request-Id-Reasoncache"
_LONGEST = 100
#: Strings that a client may send as the value of ``OPT_OUT_KEY``, in upper or lower case.
_SPELLINGS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
#: ``KEY`` marks documents. ``REPAIR_KEY`` chooses which tokens of documents are computed again (a *repair*).
KEY = "documents"
REPAIR_KEY = "documents_repair"
#: Limit on documents per prompt, because a request's first look-up in the cache matches each document.
MOST = 256
#: Limit on (tokens before the documents) x (number of documents). Every match includes those tokens.
_MOST_BEFORE = 1 << 19


class _Brief(reprlib.Repr):
    """Describes what a client sent. ``repr`` would take seconds for millions of values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = 4
        self.maxstring = 60

    def repr_dict(self, _value: dict[Any, Any], _level: int) -> str:
        return "{...}"  # the base class sorts all keys


_BRIEF = _Brief()


def _brief(value: object) -> str:
    return f"{_BRIEF.repr(value):.80}"


@dataclass(frozen=True)
class Repair:
    """Which tokens of documents are computed again, if the documents were prefilled at other positions.

    Attributes:
        first: How many tokens at the beginning of each document (EPIC, arXiv 2410.15332).
        last: How many tokens at the end of each document, beside the ``first``.
        share: The share of document tokens, 0 to 1, to which the tokens behind the documents attend most.
    """

    first: int = 0
    last: int = 0
    share: float = 0.0


def repair_of(text: object) -> Repair:
    """Parse ``none``, ``first:TOKENS``, ``ends:TOKENS`` or ``query:SHARE``. Raises ValueError for any other
    value, with a message that says what the value must be. ``ends`` are SamKV's initial and local blocks (arXiv
    2508.11661, ablation without selection): a block at the beginning, two at the end."""
    kind, _, amount = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "none":
        return Repair()
    if kind == "first" and re.fullmatch(r"[1-9][0-9]{0,4}", amount):
        return Repair(first=int(amount))
    if kind == "ends" and re.fullmatch(r"[1-9][0-9]{0,4}", amount):
        return Repair(first=int(amount), last=2 * int(amount))
    if kind == "query" and re.fullmatch(r"0?\.[0-9]{1,4}|1", amount):
        return Repair(share=float(amount))
    raise ValueError("none, first:TOKENS, ends:TOKENS or query:SHARE with a share between 0 and 1")


@dataclass(frozen=True)
class Documents:
    """Documents that follow one another in a prompt.

    Attributes:
        start: Position of the first document. The tokens before this position are the *base*. Every document is
            prefilled directly behind the base, without the other documents.
        ends: The position behind each document, ascending.
        repair: Which tokens of the documents are computed again.
    """

    start: int
    ends: tuple[int, ...]
    repair: Repair = Repair()

    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise((self.start, *self.ends)))


def documents_of(
    custom_params: object, length: int | None = None, flat: bool = True
) -> Documents | None:
    """The documents that ``custom_params`` mark; None if they mark none.

    A span is ``[start, end]`` in tokens, ``end`` excluded. Spans have no gaps between them and leave out the
    prompt's last token, which SGLang always computes. ``length``: the prompt's number of tokens, None if
    unknown. ``flat``: whether the list may be ``[start, end, start, end, ...]``, as the plugin sends it to
    schedulers; clients' numbers may be those of messages. Raises ValueError for a wrong list, span, repair or
    base length; the message names the fault.
    """
    custom = custom_params if isinstance(custom_params, dict) else {}
    spans = custom.get(KEY)
    repair = custom.get(REPAIR_KEY, "none")
    if spans is None:
        return None
    if flat and isinstance(spans, list) and _is_flat(spans):
        spans = [*zip(spans[::2], spans[1::2], strict=True)]
    if not isinstance(spans, Sequence) or isinstance(spans, str) or not 1 <= len(spans) <= MOST:
        got = f"{len(spans)} entries" if isinstance(spans, list) else _brief(spans)
        raise ValueError(f"custom_params: {KEY} must be a list of 1 to {MOST} spans, got {got}")
    ends = list[int]()
    for number, span in enumerate(spans):
        wrong = f"custom_params: {KEY}[{number}] must"
        if not isinstance(span, Sequence) or [type(bound) for bound in span[:3]] != [int, int]:
            raise ValueError(f"{wrong} be [start, end] in tokens of the prompt, got {_brief(span)}")
        start, end = span
        if ends and start != ends[-1]:
            raise ValueError(f"{wrong} begin where the one before it ends, {ends[-1]}, got {start}")
        if not 0 <= start < end:
            raise ValueError(f"{wrong} hold a token, 0 <= start < end, got {_brief(span)}")
        if length is not None and end >= length:
            raise ValueError(f"{wrong} end before the last of {length} tokens, got {end}")
        ends.append(end)
    check_before(spans[0][0], len(ends))
    try:
        return Documents(spans[0][0], tuple(ends), repair_of(repair))
    except ValueError as error:
        message = f"custom_params: {REPAIR_KEY} must be {error}, got {_brief(repair)}"
        raise ValueError(message) from error


def _is_flat(spans: list[Any]) -> bool:
    """Whether ``spans`` holds bounds, start and end in turns."""
    numbers = 1 <= len(spans) <= 2 * MOST and all(type(bound) is int for bound in spans)
    return numbers and len(spans) % 2 == 0


def most_behind(tokens: int) -> int:
    """The largest number of documents that may follow this many tokens."""
    return min(MOST, _MOST_BEFORE // max(tokens, 1))


def check_before(tokens: int, documents: int) -> None:
    """Raises ValueError if (tokens before the documents) x (number of documents) is too large."""
    if documents > most_behind(tokens):
        raise ValueError(
            f"custom_params: {KEY} must have at most {_MOST_BEFORE} tokens before the first x number of "
            f"documents, got {tokens} x {documents}"
        )


@dataclass(frozen=True)
class Asked:
    """What a client says under :data:`OPT_OUT_KEY`.

    Attributes:
        share: Whether the request may share, and policies may evict its positions.
        record: Whether the response shall say which positions read others' KV, and since when.
    """

    share: bool = True
    record: bool = False


def asked_of(custom_params: object) -> Asked:
    """What ``custom_params`` have under :data:`OPT_OUT_KEY`: true, false, or an object with the keys ``share``
    and ``record``. Raises ValueError for any other value, and unless ``custom_params`` is a dict or None."""
    if not isinstance(custom_params, dict | None):
        raise ValueError(f"custom_params must be an object, got a {type(custom_params).__name__}")
    return _options(f"custom_params: {OPT_OUT_KEY}", (custom_params or {}).get(OPT_OUT_KEY))


def header_value(lines: Sequence[str]) -> object:
    """The value for :data:`OPT_OUT_KEY` that the lines of our header have: JSON, or a bare word. None without
    lines; empty ones count as none. Raises ValueError for a wrong value, and for lines that mean different
    things."""
    values = [_header_line(line) for line in dict.fromkeys(lines) if line.strip()]
    if len({_options(HEADER, value) for value in values}) > 1:
        raise ValueError(f"{HEADER} must have one value, got {_brief(list(lines))}")
    return values[0] if values else None


def _header_line(line: str) -> object:
    if len(line) > _LONGEST:
        raise ValueError(f"{HEADER} must have at most {_LONGEST} characters, got {len(line)}")
    try:
        value: object = json.loads(line)
    except ValueError:
        return line.strip()
    return value


def _options(name: str, value: object) -> Asked:
    if not isinstance(value, dict):
        return Asked(share=value is None or _is_true(name, value))
    known = Asked.__dataclass_fields__
    if unknown := value.keys() - known.keys():
        raise ValueError(f"{name} has the keys {', '.join(known)}, got {_brief(list(unknown))}")
    return Asked(**{key: _is_true(f"{name}.{key}", each) for key, each in value.items()})


def _is_true(name: str, value: object) -> bool:
    parsed = _SPELLINGS.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, int) and value in (0, 1):
        parsed = bool(value)
    if parsed is None:
        raise ValueError(f"{name} must be true or false, got {_brief(value)}")
    return parsed


def asked_by(req: Request) -> Asked:
    """What a request asks. A request with a wrong value opts out: some frontend processes let wrong values
    through (see ``_after_verify`` in ``plugin/hooks.py``). The answer is kept, because SGLang looks waiting
    requests up often."""
    known: Asked | None = getattr(req, ASKED, None)
    if known is not None:
        return known
    try:
        options = asked_of(getattr(req.sampling_params, "custom_params", None))
    except Exception:  # such as RecursionError from the repr of a deeply nested value
        options = Asked(share=False)
    setattr(req, ASKED, options)
    return options


def takes_part(req: Request) -> bool:
    """Whether we may change a request's block table. False after opt-out or with beams, media or embeddings."""
    options = asked_by(req)
    if options.share and req.multimodal_inputs is not None:
        # Kept, because a session that is closed takes the media away from a running request.
        options = dataclasses.replace(options, share=False)
        setattr(req, ASKED, options)
    return (
        options.share
        and req.beam_group is None
        and req.input_embeds is None
        and getattr(req, "positional_embed_overrides", None) is None
    )


def only_scores(req: Request) -> bool:
    """Whether a request asks for scores or embeddings of its prompt, not for output. Before SGLang generates
    several responses to a prompt, it computes the prompt without output: for them, not for scores."""
    params = req.sampling_params
    several = (params.n or 1) > 1 and not req.return_logprob
    return bool(params.max_new_tokens == 0 and not several)
