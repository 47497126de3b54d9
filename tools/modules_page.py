# SPDX-License-Identifier: Apache-2.0
"""Makes the site's page of modules from the modules' docstrings. ``make docs`` runs this hook of MkDocs."""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).resolve().parents[1] / "sglang_reasoncache"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this once it knows the site's files. Adds ``modules.md``, which the navigation names."""
    files.append(File.generated(config, "modules.md", content=page()))
    return files


def page() -> str:
    lines = ["# Modules", "", "One line for each module, of its docstring.", ""]
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        name = folder.relative_to(PACKAGE.parent).as_posix()
        lines += [f"## {name}", "", summary(folder / "__init__.py"), ""]
        modules = [path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
        if modules:
            lines += ["| module | |", "| --- | --- |"]
            lines += [f"| `{path.name}` | {summary(path)} |" for path in modules]
            lines.append("")
    return "\n".join(lines)


def summary(path: Path) -> str:
    """First paragraph of a module's docstring, as Markdown."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
