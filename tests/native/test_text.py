# SPDX-License-Identifier: Apache-2.0
"""UTF-8 and character classes of the library against Python's own."""

from __future__ import annotations

import ctypes
import itertools
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.native.unicode_tables import (
    NUM_CODE_POINTS,
    all_characters,
    character_classes,
)
from tests.native.hostile import INVALID_UTF8


def decoded(library: ctypes.CDLL, data: bytes) -> str:
    out = (ctypes.c_uint32 * max(1, len(data)))()
    size = ctypes.c_size_t()
    given_size = ctypes.c_size_t(len(data))
    assert not library.reasoncache_decode_utf8(
        data, given_size, out, given_size, ctypes.byref(size)
    )
    return "".join(map(chr, out[: size.value]))


def encoded(library: ctypes.CDLL, text: str) -> bytes:
    out = ctypes.create_string_buffer(4 * len(text) + 1)
    size = ctypes.c_size_t()
    assert not library.reasoncache_encode_utf8(
        points(text), ctypes.c_size_t(len(text)), out, ctypes.c_size_t(len(out)), ctypes.byref(size)
    )
    return out.raw[: size.value]


def points(text: str) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * max(1, len(text)))(*map(ord, text))


def test_invalid_bytes_become_what_python_makes_of_them(library: ctypes.CDLL) -> None:
    for data in INVALID_UTF8:
        for end in range(len(data) + 1):
            assert decoded(library, data[:end]) == data[:end].decode("utf-8", "replace")


def test_every_lead_byte_with_every_kind_of_continuation(library: ctypes.CDLL) -> None:
    """All pairs of bytes, and all borders of what a second to fourth byte may be."""
    edges = bytes((0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xE2, 0xF4, 0xFF))
    pairs = b"".join(bytes((a, b)) + b"|" for a in range(256) for b in range(256))
    assert decoded(library, pairs) == pairs.decode("utf-8", "replace")
    longer = b"".join(
        bytes((lead, *rest)) + b"|"
        for lead in range(0xC0, 0x100)
        for rest in itertools.product(edges, repeat=3)
    )
    assert decoded(library, longer) == longer.decode("utf-8", "replace")


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=80), st.text(max_size=40).map(str.encode)), st.binary())
def test_any_bytes(library: ctypes.CDLL, data: bytes, more: bytes) -> None:
    joined = data + more + data[: len(data) // 2]
    assert decoded(library, joined) == joined.decode("utf-8", "replace")


def test_every_character_is_encoded_and_decoded(library: ctypes.CDLL) -> None:
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, NUM_CODE_POINTS)]))
    data = text.encode()
    assert encoded(library, text) == data
    assert decoded(library, data) == text


def test_every_character_has_the_classes_of_this_interpreter(library: ctypes.CDLL) -> None:
    numbers = array("I", range(NUM_CODE_POINTS))
    out = ctypes.create_string_buffer(NUM_CODE_POINTS)
    library.reasoncache_character_classes(
        (ctypes.c_uint32 * NUM_CODE_POINTS).from_buffer(numbers),
        ctypes.c_size_t(NUM_CODE_POINTS),
        out,
    )
    assert out.raw == character_classes(all_characters())


def test_classes_are_what_the_readers_ask_python(library: ctypes.CDLL) -> None:
    """The table itself, against the plain str methods where there are some."""
    table = character_classes(all_characters())
    for number in range(NUM_CODE_POINTS):
        char = chr(number)
        expected = (
            char.isspace()
            | (char.isalnum() or char == "_") << 1
            | char.isdecimal() << 2
            | char.isdigit() << 3
            | char.isupper() << 4
            | (char.islower() or (char.istitle() and not char.isupper())) << 5
            | (char.isalnum() and not char.isdecimal()) << 6
        )
        assert table[number] == expected, hex(number)


def test_numbers_beyond_unicode_have_no_class(library: ctypes.CDLL) -> None:
    out = ctypes.create_string_buffer(b"\xff\xff", 2)
    beyond = (ctypes.c_uint32 * 2)(NUM_CODE_POINTS, 0xFFFFFFFF)
    library.reasoncache_character_classes(beyond, ctypes.c_size_t(2), out)
    assert out.raw == b"\0\0"


_CASED = st.text(
    st.sampled_from(
        "aAzZǅßẞªº1 _\u2167\u2177\U0001d400\u03a3\u03c3\u03c2\u0130\u0131\u0416\t\n\x1c\x85\u3000x"
    )
)


@settings(deadline=None)
@given(st.one_of(_CASED, st.text()))
@pytest.mark.parametrize("pad", ["", " "])
def test_isupper_and_strip(library: ctypes.CDLL, pad: str, text: str) -> None:
    text = pad + text
    size = ctypes.c_size_t()
    found = library.reasoncache_is_upper(
        points(text), ctypes.c_size_t(len(text)), ctypes.byref(size)
    )
    assert bool(found) == text.isupper()
    assert size.value == len(text.strip())
