# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.papers_table`` writes the table of techniques between the marks in docs/papers.md."""

from pathlib import Path

from sglang_reasoncache.techniques import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "papers.md"
BEGIN = "<!-- made by `python -m tools.papers_table` -->\n"
END = "<!-- end -->\n"


def filled(text: str) -> str:
    """``text`` with the table between the marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
