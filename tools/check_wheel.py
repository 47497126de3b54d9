# SPDX-License-Identifier: Apache-2.0
"""``python -I tools/check_wheel.py TRACKED PYPROJECT``: checks the installed wheel of this project.

TRACKED: a file with the paths that git tracks in ``sglang_reasoncache/`` and ``csrc/``. The wheel must hold
these files and no others. Ends with a message and status 1 if it does not.
"""

import importlib
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

_PACKAGE = "sglang_reasoncache"


def main(tracked: Path, pyproject: Path) -> None:
    project = tomllib.loads(pyproject.read_text())["project"]
    wheel = distribution(project["name"])
    wanted = {
        f"{_PACKAGE}/{path}" if path.startswith("csrc/") else path
        for path in tracked.read_text().splitlines()
    }
    files = {file.as_posix() for file in wheel.files or ()}
    there = {file for file in files if ".dist-info/" not in file and not file.endswith(".pyc")}
    if there != wanted:
        sys.exit(f"missing: {sorted(wanted - there)}, not tracked: {sorted(there - wanted)}")
    if wheel.version != project["version"]:
        sys.exit(f"the wheel is version {wheel.version}, not {project['version']}")
    entries = {(entry.group, entry.name): entry.value for entry in wheel.entry_points}
    declared = {
        (group, name): value
        for group, values in project["entry-points"].items()
        for name, value in values.items()
    }
    if entries != declared:
        sys.exit(f"entry points are {entries}, not {declared}")
    package = importlib.import_module(_PACKAGE)
    if package.__version__ != wheel.version:
        sys.exit(f"{_PACKAGE}.__version__ is {package.__version__}, not {wheel.version}")
    # Neither needs SGLang before SGLang calls it.
    for entry in wheel.entry_points:
        entry.load()
    print(f"{package.__file__}: {len(there)} files, {len(entries)} entry points")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
