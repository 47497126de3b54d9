# SPDX-License-Identifier: Apache-2.0
"""The C++ structure reader as Python functions, for tests and measurements.

Serving calls it inside the library; see ``csrc/structure/structure.h``.
"""

from __future__ import annotations

import ctypes

from sglang_reasoncache.filter.structure import Limits, SignatureKind

_KINDS = (SignatureKind.PROSE, SignatureKind.FORMAL, SignatureKind.OVER_BOUND)
_TOO_SMALL = -2


def native_signature(
    library: ctypes.CDLL, text: str | bytes, limits: Limits, in_code: bool = False
) -> tuple[SignatureKind, bytes, str]:
    """What ``signature`` of the policy says, read by the library.

    Args:
        text: any text without lone surrogates; or any bytes, which the library
            decodes as ``bytes.decode("utf-8", "replace")`` does.
        in_code: the step begins inside a code fence.

    Returns:
        The kind, the bytes of ``serialise`` (empty unless formal), the name of
        the bound exceeded (empty unless over one).

    Raises:
        UnicodeEncodeError: a lone surrogate in ``text``.
        MemoryError: the library ran out of memory.
    """
    data = text.encode() if isinstance(text, str) else text
    # Room for most steps at once; a second call where the trees are larger.
    capacity = 4096
    while True:
        out = ctypes.create_string_buffer(capacity)
        size = ctypes.c_size_t()
        kind = library.reasoncache_structure(
            data,
            ctypes.c_size_t(len(data)),
            ctypes.c_uint32(limits.max_chars),
            ctypes.c_uint32(limits.max_depth),
            ctypes.c_uint32(limits.max_nodes),
            ctypes.c_int32(in_code),
            out,
            ctypes.c_size_t(capacity),
            ctypes.byref(size),
        )
        if kind == _TOO_SMALL:
            capacity = size.value
            continue
        if kind < 0:
            raise MemoryError("the structure reader ran out of memory")
        told = out.raw[: size.value]
        if _KINDS[kind] is SignatureKind.OVER_BOUND:
            return SignatureKind.OVER_BOUND, b"", told.decode()
        return _KINDS[kind], told, ""


def native_leaves_fence_open(library: ctypes.CDLL, text: str, in_code: bool) -> bool:
    """What ``leaves_fence_open`` of the policy says, read by the library.

    Raises:
        UnicodeEncodeError: a lone surrogate in ``text``.
        MemoryError: the library ran out of memory.
    """
    data = text.encode()
    found = library.reasoncache_leaves_fence_open(
        data, ctypes.c_size_t(len(data)), ctypes.c_int32(in_code)
    )
    if found < 0:
        raise MemoryError("the structure reader ran out of memory")
    return bool(found)
