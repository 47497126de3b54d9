# SPDX-License-Identifier: Apache-2.0
"""Builds command-line parsers from dataclasses. A field made by :func:`option` becomes a flag, or a positional
argument if the field has no default."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_K = TypeVar("_K")
_Read = Callable[[str], Any]


def option(
    default: Any = dataclasses.MISSING, text: str = "", *, read: _Read | None = None,
    least: float | None = None, most: float | None = None, choices: Collection[Any] = (),
    metavar: str | None = None,
    in_place: bool = False,
) -> Any:  # fmt: skip
    """Returns a dataclass field for an option. ``text`` is its help. The field's type says how users give the
    option: ``bool`` is a flag without a value; ``tuple[X, ...]`` is ``a,b``, or several words if the option is
    positional; ``Mapping`` is a flag that may be repeated. Any other type is called with the given word.
    ``read``, if set, converts the word instead. ``least``, ``most`` and ``choices`` restrict the value, or each
    item of a tuple. With ``in_place`` the option is a positional argument that may be left out."""
    about: dict[str, Any] = {"help": text, "read": read, "bounds": (least, most, choices)}
    about |= {"metavar": metavar, "in_place": in_place}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


def commas(kind: _Read = str) -> Callable[[str], tuple[Any, ...]]:
    """Returns a function that splits a text ``a,b`` and calls ``kind`` with each part; no value may repeat."""

    def values(text: str) -> tuple[Any, ...]:
        try:
            items = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None
        if not items or len(set(items)) < len(items):
            raise argparse.ArgumentTypeError(f"must name one or more, none twice, got {text!r}")
        return items

    return values


def flags_of(text: str) -> tuple[str, ...]:
    """Splits a text, such as the value of ``--server-flags``, into flags, as a shell would."""
    return tuple(shlex.split(text))


def parse(kind: type[_K], argv: Sequence[str] | None = None) -> _K:
    """Parses a command line into an instance of the dataclass ``kind``. If ``kind`` raises ValueError, the
    process ends with status 2, as after a bad flag."""
    parser = parser_of(kind)
    values = vars(parser.parse_args(argv))
    try:
        return kind(**values)
    except ValueError as error:
        parser.error(str(error))


def run(kind: type[_K], work: Callable[[_K], object], argv: Sequence[str] | None = None) -> None:
    """Call ``work`` with the options of a command line. If ``work`` raises OSError or ValueError, end the
    process with status 1 and a line that says why."""
    options = parse(kind, argv)
    try:
        work(options)
    except (OSError, ValueError) as error:
        sys.exit(f"{module_of(kind)}: error: {error}")


def parser_of(*kinds: type, prog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser for the options of all ``kinds``. The module that defines the first class gives the
    description (the first paragraph of its docstring), and the program's name if ``prog`` is None."""
    text = (sys.modules[kinds[0].__module__].__doc__ or "").split("\n\n")[0]
    prog = prog or f"python -m {module_of(kinds[0])}"
    parser = argparse.ArgumentParser(prog=prog, description=text, allow_abbrev=False)
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.metadata:
                _add(parser, field, hints[field.name])
    return parser


def module_of(kind: type) -> str:
    """The name under which ``python -m`` runs the module that defines ``kind``."""
    spec = getattr(sys.modules[kind.__module__], "__spec__", None)
    return (spec.name if spec else kind.__module__).removesuffix(".__main__")


def _add(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any) -> None:
    about = field.metadata
    kind = hint
    is_required = field.default is dataclasses.MISSING
    if get_origin(hint) is UnionType:
        (kind,) = (member for member in get_args(hint) if member is not NoneType)
    argument: dict[str, Any] = {"help": about["help"]}
    if kind is bool:
        argument["action"] = "store_true"
    else:
        read = about["read"] or kind
        several = get_origin(kind) is tuple
        if several and about["read"] is None:
            (item, _) = get_args(kind)
            read = item if is_required else commas(item)
        argument |= {"type": _bounded(read, *about["bounds"]), "metavar": about["metavar"]}
        argument |= {"nargs": "+"} if several and is_required else {}
        argument |= {"action": "append"} if get_origin(kind) is Mapping else {}
    if is_required or about["in_place"]:
        argument |= {} if is_required else {"nargs": "?", "default": field.default}
        parser.add_argument(field.name, **argument)
        return
    # The default of a Mapping must be a list, because argparse appends given values to a copy of it.
    argument["default"] = [] if get_origin(kind) is Mapping else field.default
    if field.default not in (None, False, ()):
        argument["help"] += f" (default {_as_typed(field.default, about['read'])})"
    parser.add_argument("--" + field.name.replace("_", "-"), dest=field.name, **argument)


def _as_typed(default: Any, read: _Read | None) -> str:
    """``default`` as users would type it, for a help text."""
    if isinstance(default, tuple):
        default = shlex.join(default) if read is flags_of else ",".join(map(str, default))
    return str(default).replace("%", "%%")


def _bounded(
    read: _Read, least: float | None, most: float | None, choices: Collection[Any]
) -> _Read:
    def value(text: str) -> Any:
        result = read(text)
        for item in result if isinstance(result, tuple) else (result,):
            if choices and item not in choices:
                allowed = ", ".join(map(str, choices))
                raise argparse.ArgumentTypeError(f"must be of {allowed}, got {text}")
            if least is not None and not item >= least:
                raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {text}")
            if most is not None and not item <= most:
                raise argparse.ArgumentTypeError(f"must be at most {most:g}, got {text}")
        return result

    value.__name__ = getattr(read, "__name__", "value")
    return value
