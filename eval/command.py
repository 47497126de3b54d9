# SPDX-License-Identifier: Apache-2.0
"""Command lines from dataclasses: a field made by :func:`option` is a flag, without a default a
positional argument."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_K = TypeVar("_K")


def option(
    default: Any = dataclasses.MISSING,
    text: str = "",
    *,
    read: Callable[[str], Any] | None = None,
    least: float | None = None,
    most: float | None = None,
    **argument: Any,
) -> Any:
    """A field of a class of options; ``text`` is its help. The annotation says how it is read: a
    ``bool`` is a switch, a ``tuple[X, ...]`` takes several words, a ``Mapping`` may be given several
    times, any other type is called with the word. ``read`` makes the whole value of one word instead.
    ``least`` and ``most`` bound numbers. ``argument`` goes to
    :meth:`argparse.ArgumentParser.add_argument`; ``flag`` among it is another name of the flag."""
    about = {"text": text, "read": read, "bounds": (least, most), "argument": argument}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


def commas(kind: Callable[[str], Any] = str) -> Callable[[str], tuple[Any, ...]]:
    """Reads ``a,b``: values of one kind, none of them twice."""

    def values(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None
        if not found or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"must name one or more, none twice, got {text!r}")
        return found

    return values


def parse(kind: type[_K], argv: Sequence[str] | None = None) -> _K:
    """The options that a command line gives. A ValueError that ``kind`` raises ends the process with
    status 2, as a bad flag does."""
    parser = parser_of(kind)
    given = values_of(parser, sys.argv[1:] if argv is None else argv)
    try:
        return kind(**given)
    except ValueError as error:
        parser.error(str(error))


def run(kind: type[_K], work: Callable[[_K], object], argv: Sequence[str] | None = None) -> None:
    """``work`` by the options of a command line. An OSError or ValueError, a file that cannot be
    used, ends the process with status 1 and a line that says so."""
    options = parse(kind, argv)
    try:
        work(options)
    except (OSError, ValueError) as error:
        sys.exit(f"{module_of(kind)}: error: {error}")


def parser_of(*kinds: type, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options of some classes. Description and, unless ``prog`` is given, program
    are those of the module that defines the first."""
    text = (sys.modules[kinds[0].__module__].__doc__ or "").split("\n\n")[0]
    prog = prog or f"python -m {module_of(kinds[0])}"
    parser = argparse.ArgumentParser(prog=prog, description=text, allow_abbrev=False)
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.metadata:
                _add(parser, field, hints[field.name])
    return parser


def values_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Values by field: several words as a tuple, pairs as a dictionary."""
    # Apart from its value argparse would take ``--both --tp=2`` for two flags.
    flags = {one.option_strings[0] for one in parser._actions if one.type is flags_of}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in flags:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    given = vars(parser.parse_args(joined))
    pairs = {one.dest for one in parser._actions if isinstance(one, argparse._AppendAction)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = dict(value) if name in pairs else tuple(value)
    return given


def flags_of(text: str) -> tuple[str, ...]:
    """Reads the flags of a server, all in one word."""
    return tuple(shlex.split(text))


def module_of(kind: type) -> str:
    """The module in which ``kind`` is, by the name that ``python -m`` takes."""
    spec = getattr(sys.modules[kind.__module__], "__spec__", None)
    return (spec.name if spec else kind.__module__).removesuffix(".__main__")


def _add(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any) -> None:
    about, kind = field.metadata, hint
    if get_origin(hint) is UnionType:
        (kind,) = (one for one in get_args(hint) if one is not NoneType)
    argument: dict[str, Any] = {"help": about["text"], **about["argument"]}
    several = get_origin(kind) is tuple and about["read"] is None
    if kind is bool:
        argument["action"] = "store_true"
    else:
        read = about["read"] or (get_args(kind)[0] if several else kind)
        argument.setdefault("type", _bounded(read, *about["bounds"]))
        argument = {"nargs": "+", **argument} if several else argument
        argument |= {"action": "append"} if get_origin(kind) is Mapping else {}
    if field.default is dataclasses.MISSING:
        parser.add_argument(field.name, **argument)
        return
    # A pair's default is a list to which argparse appends.
    argument["default"] = [] if get_origin(kind) is Mapping else field.default
    if field.default not in (None, False, ()):
        argument["help"] += " (default %(default)s)"
    name = argument.pop("flag", "--" + field.name.replace("_", "-"))
    parser.add_argument(name, dest=field.name, **argument)


def _bounded(
    read: Callable[[str], Any], least: float | None, most: float | None
) -> Callable[[str], Any]:
    if least is None and most is None:
        return read

    def value(text: str) -> Any:
        found = read(text)
        for one in found if isinstance(found, tuple) else (found,):
            if least is not None and not one >= least:
                raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {text}")
            if most is not None and not one <= most:
                raise argparse.ArgumentTypeError(f"must be at most {most:g}, got {text}")
        return found

    value.__name__ = getattr(read, "__name__", "value")
    return value
