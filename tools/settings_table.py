# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.settings_table`` prints the text of docs/settings.md."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_reasoncache.arguments import FLAGS, SET, flag_of, text_of
from sglang_reasoncache.config import SETTINGS
from sglang_reasoncache.plugin.flags import WORDS_ENV

_HEAD = f"""# Settings

Made by `python -m tools.settings_table`. Settings without a flag of their own are
given as `{SET} key=value,key=value`, which may be repeated.

- `sglang.Engine(enable_reasoncache=True, ...)` takes every setting as the keyword `reasoncache_<key>`, or
  all of them as a mapping: `enable_reasoncache={{"when": "always"}}`.
- A launcher that makes `ServerArgs` itself (verl, slime, AReaL, `Engine(server_args=...)`) switches the
  plugin on with the environment variable `{WORDS_ENV}`, which holds the words of a command line:
  `{WORDS_ENV}="--enable-reasoncache --reasoncache-when always"`. Flags and keywords win over it.
- `REASONCACHE_CACHE_DIR` is the folder of the libraries that are built at the first start, by default
  `sglang-reasoncache` in `XDG_CACHE_HOME` or `~/.cache`.
"""


def lines() -> Iterator[str]:
    yield from (_HEAD, "| Setting | Values | Default | What it does |", "| --- | --- | --- | --- |")
    for name in (*FLAGS, *(name for name in SETTINGS if name not in FLAGS)):
        field = SETTINGS[name]
        bounds = field.metadata["bounds"]
        values = field.metadata["values"] if bounds is None else f"{bounds[0]} to {bounds[1]}"
        typed = flag_of(name) if name in FLAGS else name
        default = "" if field.default is None else f"`{text_of(field.default)}`"
        text = field.metadata["help"].replace("|", "\\|")
        yield f"| `{typed}` | {values.replace('|', ', ')} | {default} | {text} |"


if __name__ == "__main__":
    print("\n".join(lines()))
