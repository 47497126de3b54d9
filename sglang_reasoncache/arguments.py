# SPDX-License-Identifier: Apache-2.0
"""Translates settings to command-line arguments, and back."""

from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

#: Settings with a flag of their own. All other settings are given with the flag :data:`SET`.
FLAGS = (
    "policy",
    "preset",
    "when",
    "scope",
    "block",
    "percentile",
    "positions",
    "span",
)
SET = "--reasoncache-set"
_BOOLEANS = {"true": True, "false": False}
#: Type of a setting -> name of the type in error messages.
CALLED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def flag_of(field: str) -> str:
    """The flag of a setting: ``--reasoncache-block`` for block, ``--reasoncache-set warmup`` for warmup."""
    return "--reasoncache-" + field.replace("_", "-") if field in FLAGS else f"{SET} {field}"


def arguments_of(values: Mapping[str, object]) -> list[str]:
    """The command-line arguments that set ``values``. A setting whose value is None is left out."""
    given = {name: text_of(value) for name, value in values.items() if value is not None}
    words = [word for name in FLAGS if name in given for word in (flag_of(name), given[name])]
    others = [f"{name}={text}" for name, text in given.items() if name not in FLAGS]
    return [*words, SET, ",".join(others)] if others else words


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def kind_of(hint: Any) -> type:
    """The type ``X`` of an annotation that is ``X`` or ``X | None``."""
    kind: type = next(part for part in get_args(hint) or (hint,) if part is not NoneType)
    return kind


def value_of(text: str, kind: type) -> Any:
    """The inverse of :func:`text_of`. Raises ValueError, naming ``kind``, if ``text`` does not fit ``kind``."""
    try:
        if kind is not str and ("_" in text or not text.isascii()):
            raise ValueError("Python reads 1_0 as 10")
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise ValueError(CALLED[kind]) from error
