# SPDX-License-Identifier: Apache-2.0
"""Finds what our classes take from SGLang's: methods that they override or call by ``super()``. A module of
ours that the installed SGLang does not let in, because a name is missing there, hides no other module."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import sglang_reasoncache
from tests.flash_attention import import_backend

# ``compat.NAMES`` has the name, so a test names it if it is missing.
with contextlib.suppress(Exception):
    import_backend()

#: Caches sources, because ``getsource`` parses the whole file of a class at each call.
source = functools.cache(inspect.getsource)
#: Our modules that could not be imported, and why.
FAILED: dict[str, Exception] = {}


def _modules() -> Iterator[Any]:
    for module in pkgutil.walk_packages(
        sglang_reasoncache.__path__, "sglang_reasoncache.", onerror=lambda _: None
    ):
        if not module.name.endswith(("cpu.platform", "__main__")):
            try:
                yield importlib.import_module(module.name)
            except Exception as error:
                FAILED[module.name] = error


def _classes() -> Iterator[type]:
    """Our CUDA backends, which are classes made at run time, and all our classes outside ``cpu.platform``."""
    for module in _modules():
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value
    name = "sglang_reasoncache.plugin.attention"
    if name not in FAILED:
        attention: Any = importlib.import_module(name)
        for key in attention.STOCK:
            try:
                yield attention.backend_class(*key)
            except Exception as error:
                FAILED[f"{name}: {key}"] = error


def _stock(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("sglang.")]


def _overrides() -> Iterator[tuple[Any, Any]]:
    for cls in CLASSES:
        stock = _stock(cls)
        for base in cls.__mro__ if stock else ():
            for name, method in vars(base).items():
                if inspect.isfunction(method) and base not in stock and name != "__init__":
                    yield from ((method, vars(s)[name]) for s in stock if name in vars(s))


def _calls_of_super() -> Iterator[tuple[type, str, list[type]]]:
    for cls in CLASSES:
        stock = _stock(cls)
        for base in cls.__mro__ if stock else ():
            if base.__module__.startswith("sglang_reasoncache."):
                names = re.findall(r"\bsuper\(\)\.(\w+)", _text(base))
                yield from ((base, name, stock) for name in names)


def _text(cls: type) -> str:
    try:
        return source(cls)
    except OSError:  # A class that was made at run time has no text.
        return ""


CLASSES = [*_classes()]
#: Pairs of our method and the SGLang method that it overrides.
OVERRIDES = sorted(set(_overrides()), key=lambda pair: (pair[0].__qualname__, pair[1].__qualname__))
#: (Our class, the name of a method that it calls of ``super()``) -> the name, and SGLang's classes below ours.
SUPER = {(ours.__qualname__, name): (name, stock) for ours, name, stock in _calls_of_super()}
