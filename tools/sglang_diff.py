# SPDX-License-Identifier: Apache-2.0
"""What changed in SGLang, of what we use of it. ``tools/sglang_diff.sh`` runs the three steps:

- ``python -m tools.sglang_diff dump OLD.json`` writes the source of what we use of the SGLang that is imported.
- ``dump NEW.json OLD.json`` writes the source of the same objects in another version.
- ``compare OLD.json NEW.json [--full]`` prints what is gone or differs; with ``--full``, how it differs."""

import difflib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HOOKS = ("", "LAUNCHER_", "FRONTEND_", "CPU_", "CUDA_")


def _uses() -> Iterator[tuple[str, str]]:
    """How we use an object of SGLang, and its path."""
    from sglang_reasoncache import compat
    from tests.contract import ours, test_compat

    for kind in _HOOKS:
        yield from (("hook", path) for path in vars(compat)[f"{kind}HOOK_TARGETS"].values())
    yield from (("import", path) for path in compat.NAMES.values())
    for _, theirs in ours.OVERRIDES:
        if theirs.__module__.startswith("sglang."):
            yield "override", f"{theirs.__module__}.{theirs.__qualname__}"
    for name, stock in ours.SUPER.values():
        for base in stock:
            if name in vars(base):
                yield "super", f"{base.__module__}.{base.__qualname__}.{name}"
    yield from (("contract test", f"sglang.srt.{case.split()[0]}") for case in test_compat.CASES)


def _source(path: str, bases: list[str]) -> str | None:
    """None if there is no such object. "" if it has no source, or is one of the classes ``bases`` that ours
    extend: of these only the methods that we use are compared."""
    try:
        target: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
    if path in bases:
        return ""
    try:
        return inspect.getsource(getattr(target, "fget", None) or target)
    except (TypeError, OSError):
        return ""


def dump(old: dict[str, Any] | None) -> dict[str, Any]:
    """``old``: what this function returned for another version."""
    from sglang_reasoncache import compat
    from tests.contract import ours

    uses: dict[str, list[str]] = {}
    for kind, path in _uses():
        uses[path] = sorted({kind, *uses.get(path, ())})
    bases = [
        f"{base.__module__}.{base.__qualname__}" for cls in ours.CLASSES for base in cls.__mro__
    ]
    if old:
        uses = old["uses"]
        bases = old["bases"]
    fields = {name for base in compat.ServerArgs.__mro__ for name in inspect.get_annotations(base)}
    sources = {path: _source(path, bases) for path in uses}
    version = compat.version("sglang")
    return dict(version=version, uses=uses, bases=bases, sources=sources, fields=sorted(fields))


def compare(old: dict[str, Any], new: dict[str, Any], full: bool) -> Iterator[str]:
    """Lines that say what of ``old`` is gone or differs in ``new``."""
    unchanged = 0
    for path, kinds in sorted(old["uses"].items()):
        before = old["sources"][path]
        after = new["sources"][path]
        if before == after is not None:
            unchanged += 1
            continue
        if before is None or after is None:
            where = new if after is None else old
            yield f"not in {where['version']}  {path}  ({', '.join(kinds)})"
            continue
        lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)]
        added, removed = (sum(line.startswith(mark) for line in lines[2:]) for mark in "+-")
        yield f"changed +{added} -{removed}  {path}  ({', '.join(kinds)})"
        yield from (f"    {line}" for line in lines[2:] if full)
    yield f"unchanged: {unchanged} of {len(old['uses'])}"
    for change, version, other in (("new", new, old), ("gone", old, new)):
        fields = sorted({*version["fields"]} - {*other["fields"]})
        yield f"{change} fields of ServerArgs: {', '.join(fields) or 'none'}"


def main() -> None:
    what, first, *rest = sys.argv[1:]
    others = [json.loads(Path(name).read_text()) for name in rest if name != "--full"]
    if what == "dump":
        Path(first).write_text(json.dumps(dump(others[0] if others else None)))
    else:
        print(*compare(json.loads(Path(first).read_text()), others[0], "--full" in rest), sep="\n")


if __name__ == "__main__":
    main()
