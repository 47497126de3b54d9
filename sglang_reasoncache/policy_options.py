# SPDX-License-Identifier: Apache-2.0
"""Parses ``--reasoncache-policy``: which policies act, with which options.

A NAME may be ``module:Class``, a policy of another package. A policy's options are separated by ``,`` or ``:``.
With ``:`` only, the flag's value can also be an item of a comma-separated list, such as the value of
``--reasoncache-set``.
``reasoncache+keydiff:budget=512,recent=64`` means the same as ``reasoncache+keydiff:budget=512:recent=64``."""

import dataclasses
import functools
import re
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_reasoncache import registry, techniques
from sglang_reasoncache.arguments import kind_of, value_of
from sglang_reasoncache.eviction.policies.contract import NamedPolicy
from sglang_reasoncache.eviction.policies.evictor import Evictor, OptionError
from sglang_reasoncache.registry import NOTHING, SHARING
from sglang_reasoncache.selection.quest import Quest

_Policy = TypeVar("_Policy")
#: Names of all policies of this package.
_KNOWN = (NOTHING, SHARING, *registry.BUILT_IN, *registry.SELECTING)
_LONGEST = 1000
#: ``module:Class``, perhaps with options. Where a name's first option would be is no ``=``, so it is the class.
_OF_A_PACKAGE = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)\s*(?:[,:](.*))?")


class PolicyError(ValueError):
    """A policy's text is wrong. The message follows the words ``must be NAME[:key=value,...][+NAME...]``."""


@dataclass(frozen=True)
class PolicyChoice:
    """What ``--reasoncache-policy`` chooses. ``evictors``: evicting policies in the order in which they act.
    ``selector``: selects what decode steps read. None: they read everything."""

    shares: bool
    evictors: tuple[NamedPolicy, ...] = ()
    selector: Quest | None = None

    @property
    def needs_our_attention(self) -> bool:
        """Whether only our kernels can read what the policies leave."""
        return bool(self.evictors) or self.selector is not None


@functools.lru_cache(maxsize=64)
def parse(text: str) -> PolicyChoice:
    """Parses ``NAME[:key=value,...][+NAME...]``. Raises PolicyError for any other text."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise PolicyError(f"a text of at most {_LONGEST} characters")
    parts = [_name_and_options(part.strip()) for part in text.split("+")]
    names = [name for name, _ in parts]
    for name, options in parts:
        if name and names.count(name) > 1:
            raise PolicyError(f"with {name} once")
        if name in (NOTHING, SHARING) and options:
            raise PolicyError(f"with {name} without options (sharing has flags of its own)")
        if name == NOTHING and len(parts) > 1:
            raise PolicyError(f"{NOTHING} alone, or without it")
    selector = None
    evictors = []
    for name, options in parts:
        if name in registry.SELECTING:
            selector = _with_options(name, registry.SELECTING[name], options)
        elif name not in (NOTHING, SHARING):
            evictors.append(NamedPolicy(name, _evictor(name, options)))
    return PolicyChoice(SHARING in names, tuple(evictors), selector)


def _name_and_options(part: str) -> tuple[str, str]:
    name, _, options = part.partition(":")
    of_a_package = _OF_A_PACKAGE.fullmatch(part)
    if of_a_package is None or name in _KNOWN:
        return name, options
    return of_a_package[1], of_a_package[2] or ""


def _evictor(name: str, options: str) -> Evictor:
    try:
        kind = registry.evictor_class(name)
    except KeyError as error:
        bound = f"with every NAME one of {', '.join(_KNOWN)} or module:Class, not {name!r}"
        technique = techniques.named(name)
        if technique is not None:
            bound += f" ({technique.sentence})"
        raise PolicyError(bound) from error
    except ValueError as error:
        raise PolicyError(f"with {name} an evicting policy ({error})") from error
    return _with_options(name, kind, options)


def _with_options(name: str, kind: type[_Policy], options: str) -> _Policy:
    """Make a policy of class ``kind``, a dataclass whose fields are its options."""
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    types_of = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for part in re.split("[,:]", options) if options else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        key = key.replace("-", "_")
        if not equals or not value:
            raise PolicyError(f"with key=value for {name} instead of {part!r}")
        if key not in fields:
            raise PolicyError(f"with options of {name} among {', '.join(fields)}, not {key!r}")
        if key in given:
            raise PolicyError(f"with {key} of {name} once")
        try:
            given[key] = value_of(value, kind_of(types_of[key]))
        except ValueError as error:
            raise PolicyError(f"with {key} of {name} {error}, not {value!r}") from error
    try:
        return kind(**given)
    except OptionError as error:
        raise PolicyError(f"with {error.key} of {name} {error.bound}") from error
