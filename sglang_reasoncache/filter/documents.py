# SPDX-License-Identifier: Apache-2.0
"""Finds documents that no client marked: text that stood in earlier prompts behind other text.

An index of hashes of token windows proposes places, and comparing tokens decides. Who reads cached KV looks it
up by the prompt's own tokens, so an error here could only propose spans of no use."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: Tokens of a hashed window. Of ``_EVERY`` windows in a row (a power of two) the index has the one with the
#: least hash (winnowing). So equal texts of at least ``LEAST`` tokens have a window of the index in common.
WINDOW = 32
_EVERY = 8
LEAST = WINDOW + _EVERY
#: A document may lack this many tokens at an end, because a tokenizer joins what is there with its neighbours.
_TRIM = 16
#: Up to this many unknown tokens between documents, such as a number or a role, are a document of their own.
_GAP = 32
#: Prompts are alike if this many first tokens are equal. Only alike prompts have the same base.
_HEAD = 8
_MOST_BASE = 1 << 14
#: Tokens of all bases, and how many bases are kept.
_MOST_IN_BASES = 1 << 20
_MOST_BASES = 1 << 16
#: Tokens of all texts in the index, and texts that are looked up for one hash.
_MOST_TOKENS = 1 << 20
_MOST_PLACES = 4
#: In longer prompts nothing is looked for: they would keep the process that serves HTTP busy for too long.
MOST_PROMPT = 1 << 16
#: Tokens that may be compared for each token of a prompt, and what a comparison counts at least.
_MOST_COMPARED = 8
_COMPARISON = 64
_MASK = (1 << 64) - 1


class _Prompt(NamedTuple):
    """A prompt of ``n`` tokens.

    Attributes:
        tokens: int64 ``[n]``.
        before: For each token a hash of the prompt up to its end, uint64 ``[n]``.
        hashes: Hashes of the windows that begin at the first tokens, uint64 ``[n - WINDOW + 1]``.
    """

    tenant: bytes
    tokens: np.ndarray
    before: np.ndarray
    hashes: np.ndarray


@dataclass(eq=False)
class _Text:
    """A text of earlier prompts.

    Attributes:
        tenant: Only prompts of this tenant find the text.
        tokens: int64 ``[n]``.
        before: As in a prompt, of the prompt where the text was found.
        is_document: Whether the text was found behind different text. Otherwise it is what a prompt had first,
            and a document may be any part of it.
        places: Hash of a window of the index -> the window's first place in the text.
    """

    tenant: bytes
    tokens: np.ndarray
    before: np.ndarray
    is_document: bool
    places: dict[int, int]


class _Match(NamedTuple):
    """Tokens ``[start, end)`` of a prompt equal the part of ``text`` that begins at ``at``.

    ``moves``: whether the text is a document, or stood behind different text.
    """

    text: _Text
    start: int
    end: int
    at: int
    moves: bool

    @property
    def length(self) -> int:
        return self.end - self.start

    def is_usable(self, least: int) -> bool:
        """Whether at least ``least`` tokens are equal, of a document all but a few at its ends."""
        missing = max(self.at, len(self.text.tokens) - self.at - self.length)
        return self.length >= least and (missing <= _TRIM or not self.text.is_document)


class DocumentFinder:
    """The texts of earlier prompts. A text becomes a document when it is found behind different text.

    Memory is bounded: texts that were used longest ago are dropped. Time per prompt is linear in its length: if
    a client crafts texts that need too many comparisons, less is found.

    Args:
        least: Fewest tokens of a document, at least :data:`LEAST`.
        most: Most tokens that are kept.
    """

    def __init__(self, least: int, most: int = _MOST_TOKENS) -> None:
        self._least = least
        self._most = most
        # Ordered by last use, the oldest first.
        self._texts: OrderedDict[_Text, None] = OrderedDict()
        self._tokens = 0
        self._index: dict[int, list[_Text]] = {}
        # Tenant and first tokens -> the tokens with which all these prompts begin.
        self._bases: OrderedDict[tuple[bytes, bytes], np.ndarray] = OrderedDict()
        self._in_bases = 0
        # How many tokens may still be compared for the prompt at hand.
        self._may_compare = 0
        # Secret, so that no client can choose windows of equal hash.
        count = WINDOW.bit_length() + 1
        self._factors = [np.uint64(secrets.randbits(64) | 1) for _ in range(count)]

    def __len__(self) -> int:
        """Number of tokens that are kept."""
        return self._tokens

    def find(self, tenant: bytes, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """The documents of ``prompt``: spans ``(start, end)`` that follow one another without a gap and leave
        out the last token. Empty if there are fewer than two. What is new in ``prompt`` enters the index.

        Tokens before the first span are the prompt's base. What earlier prompts had at the same place, behind
        the same tokens, is at most the first document: that one is read where it was computed.
        """
        if not _HEAD + self._least <= len(prompt) <= MOST_PROMPT:
            return []
        tokens = np.asarray(prompt, dtype=np.int64)
        hashes = self._window_hashes(tenant, tokens)
        hashed = _Prompt(tenant, tokens, self._prefix_hashes(tokens), hashes)
        base, is_new = self._base(hashed)
        self._may_compare = _MOST_COMPARED * len(tokens)
        matches = list(self._matches(hashed, base))
        # If no earlier prompt begins alike, the prompt enters whole.
        at = _HEAD if is_new else base
        for match in matches:
            self._add(hashed, at, match.start, is_document=False)
            self._use(match, hashed)
            at = match.end
        self._add(hashed, at, len(tokens), is_document=False)
        while self._tokens > self._most:
            self._drop(next(iter(self._texts)))
        return _spans(matches, base, len(tokens) - 1)

    def _base(self, prompt: _Prompt) -> tuple[int, bool]:
        """Number of first tokens that all alike prompts have, and whether there was no such prompt before."""
        tokens = prompt.tokens
        name = prompt.tenant, tokens[:_HEAD].tobytes()
        known = self._bases.get(name)
        base = _equal(tokens, tokens[:_MOST_BASE] if known is None else known)
        if known is None or base < len(known):
            self._bases[name] = tokens[:base].copy()
            self._in_bases += base - (0 if known is None else len(known))
        self._bases.move_to_end(name)
        while self._in_bases > _MOST_IN_BASES or len(self._bases) > _MOST_BASES:
            _, dropped = self._bases.popitem(last=False)
            self._in_bases -= len(dropped)
        return (len(tokens), True) if known is None else (base, False)

    def _prefix_hashes(self, tokens: np.ndarray) -> np.ndarray:
        """For each token a hash of all tokens up to its end, uint64 ``[n]``."""
        powers = np.cumprod(np.full(len(tokens), self._factors[0]))
        return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)

    def _window_hashes(self, tenant: bytes, tokens: np.ndarray) -> np.ndarray:
        """The hash of the window that begins at each token but the last ones, uint64."""
        hashes = tokens.astype(np.uint64) * self._factors[0]
        width = 1
        for factor in self._factors[2:]:
            hashes = hashes[:-width] * factor + hashes[width:]
            width = 2 * width
        assert width == WINDOW
        return (hashes ^ np.uint64(hash(tenant) & _MASK)) * self._factors[1]

    def _matches(self, prompt: _Prompt, base: int) -> Iterator[_Match]:
        """What earlier prompts had of this one behind its base, from left to right, without overlap: documents,
        and between these what becomes one."""
        places = _sampled(prompt.hashes[base:]) + base
        end = len(prompt.tokens)
        for known in [*self._scan(prompt, places, base, end, documents=True), None]:
            start = end if known is None else known.start
            if start - base >= self._least:
                yield from self._scan(prompt, places, base, start, documents=False)
            if known is not None:
                yield known
                base = known.end

    def _scan(
        self, prompt: _Prompt, places: np.ndarray, floor: int, stop: int, *, documents: bool
    ) -> Iterator[_Match]:
        """Texts of the index in ``[floor, stop)`` of the prompt, documents or others, from left to right. Of
        texts that begin within a few tokens, the longest."""
        places = places[slice(*np.searchsorted(places, (floor, stop - WINDOW + 1)))]
        best = None
        compared = set[tuple[_Text, int]]()
        for at, name in zip(places.tolist(), prompt.hashes[places].tolist(), strict=True):
            if best is not None and at > best.start + _TRIM + _EVERY:
                yield best
                floor = best.end
                best = None
                compared.clear()
            # Tokens before ``floor`` are not compared again.
            if at < floor:
                continue
            behind = floor
            for text in self._index.get(name, ()):
                if text.is_document != documents or text.tenant != prompt.tenant:
                    continue
                place = text.places[name]
                if (text, at - place) in compared or self._may_compare <= 0:
                    continue
                compared.add((text, at - place))
                match = _matched(prompt, text, at, place, floor, stop)
                self._may_compare -= max(match.length, _COMPARISON)
                if match.is_usable(self._least):
                    best = match if best is None or match.length > best.length else best
                else:
                    behind = max(behind, match.end)
            if best is None:
                floor = behind
        if best is not None:
            yield best

    def _use(self, match: _Match, prompt: _Prompt) -> None:
        """Note that ``prompt`` has a known text. What moved becomes a document. A document is cut to what was
        found of it."""
        text = match.text
        if text not in self._texts:
            # The text was cut at an earlier place in this prompt.
            return
        self._texts.move_to_end(text)
        is_cut = match.length < len(text.tokens)
        if match.moves and (is_cut or not text.is_document):
            if text.is_document:
                self._drop(text)
            self._add(prompt, match.start, match.end, is_document=True)

    def _add(self, prompt: _Prompt, start: int, end: int, *, is_document: bool) -> None:
        """Enter tokens ``[start, end)`` of ``prompt`` as a text, if they are enough."""
        if end - start < self._least:
            return
        tokens = prompt.tokens[start:end].copy()
        before = prompt.before[start:end].copy()
        hashes = prompt.hashes[start : end - WINDOW + 1]
        places = _sampled(hashes)[::-1]
        names = dict(zip(hashes[places].tolist(), places.tolist(), strict=True))
        text = _Text(prompt.tenant, tokens, before, is_document, names)
        for name in names:
            texts = self._index.setdefault(name, [])
            texts.insert(0, text)
            del texts[_MOST_PLACES:]
        self._texts[text] = None
        self._tokens += end - start

    def _drop(self, text: _Text) -> None:
        del self._texts[text]
        self._tokens -= len(text.tokens)
        for name in text.places:
            texts = self._index.get(name, [])
            if text in texts:
                texts.remove(text)
                if not texts:
                    del self._index[name]


def _matched(prompt: _Prompt, text: _Text, at: int, place: int, floor: int, stop: int) -> _Match:
    """What of the prompt in ``[floor, stop)``, around ``at``, equals a text around ``place``."""
    left = _equal(prompt.tokens[floor:at][::-1], text.tokens[:place][::-1])
    right = _equal(prompt.tokens[at:stop], text.tokens[place:])
    end = at + right
    is_elsewhere = right > 0 and prompt.before[end - 1] != text.before[place + right - 1]
    return _Match(text, at - left, end, place - left, text.is_document or bool(is_elsewhere))


def _spans(matches: Sequence[_Match], base: int, last: int) -> list[tuple[int, int]]:
    """The documents that follow one another behind the base, and short gaps between them, up to ``last``."""
    spans = list[tuple[int, int]]()
    at = base
    moved = False
    for match in matches:
        start = match.start
        end = min(match.end, last)
        if start - at > _GAP or start >= end or not (match.moves or start == base):
            break
        spans += [(at, start)] * (start > at) + [(start, end)]
        at = end
        moved = moved or match.moves
    return spans if moved and len(spans) > 1 else []


def _sampled(hashes: np.ndarray) -> np.ndarray:
    """Indexes of the hashes whose windows are in the index, int64 ascending."""
    width = 1 << (min(len(hashes), _EVERY).bit_length() - 1) if len(hashes) else 1
    lowest = _sliding(np.minimum, hashes, width)
    # A hash is the lowest of a run with it if and only if it is the highest of those runs' lowest hashes.
    return np.flatnonzero(hashes == _sliding(np.maximum, np.pad(lowest, width - 1), width))


def _sliding(reduce: np.ufunc, values: np.ndarray, width: int) -> np.ndarray:
    """``reduce`` over each run of ``width`` values, a power of two."""
    done = 1
    while done < width:
        values = reduce(values[:-done], values[done:])
        done = 2 * done
    return values


def _equal(left: np.ndarray, right: np.ndarray) -> int:
    """Number of equal tokens at the beginning of both."""
    most = min(len(left), len(right))
    at = 0
    step = 64
    while at < most:
        differ = np.flatnonzero(
            left[at : at + step][: most - at] != right[at : at + step][: most - at]
        )
        if len(differ):
            return at + int(differ[0])
        at = at + step
        step = 2 * step
    return most
