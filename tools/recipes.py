# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.recipes FOLDER`` counts which recipes of SemiAnalysis InferenceX, a checkout in ``FOLDER``,
start with ``--enable-reasoncache`` as they are written, and which of these share.

Only NVIDIA recipes that run SGLang and are not deprecated count. Flags decide, and the family of the model by
the recipe's name. No server starts, so refusals that need the model's weights or a GPU are not found. A
script's flags count whatever the conditions under which it gives them."""

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from sglang_reasoncache import compat
from sglang_reasoncache.plugin import refusals

#: Parts of recipes' names whose models have sparse attention: only their admission learns.
_SPARSE = ("dsv4", "deepseek-v4", "glm5", "dsv3.2", "deepseek-v3.2", "minimaxm3", "minimax-m3")
#: GPUs that are not NVIDIA's, in names of recipes.
_OTHERS = re.compile(r"mi3\d\d|_amd|amd_")
#: What is counted of recipes that share.
_COUNTED: dict[str, Callable[[dict[str, str]], bool]] = {
    "TRT-LLM attention": lambda flags: "trtllm" in flags.get("--attention-backend", ""),
    "decode server of a PD pair": lambda flags: flags.get("--disaggregation-mode") == "decode",
    "speculation": lambda flags: "--speculative-algorithm" in flags,
    "no prefix cache": lambda flags: "--disable-radix-cache" in flags,
    "several processes serve HTTP": lambda flags: "--tokenizer-worker-num" in flags,
}
_SECTIONS = ("decode", "aggregated", "agg")


def _of_script(text: str) -> Iterator[dict[str, str]]:
    """All flags in a shell script that starts a server. Scripts collect them in variables, under conditions."""
    if not re.search(r"sglang\.launch_server|sglang serve", text):
        return
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    words = " ".join(lines).replace("=", " ").replace("\\", " ").split()
    flags: dict[str, str] = {}
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            value = following.strip("\"')")
            flags[word] = "" if value.startswith(("-", ">", "|")) else value
    if flags.get("--disaggregation-mode") != "prefill":
        yield flags


def _of_yaml(text: str) -> Iterator[dict[str, str]]:
    """The flags of the servers of a ``srt-slurm`` recipe that decode."""
    config = (yaml.safe_load(text).get("backend") or {}).get("sglang_config") or {}
    for section in _SECTIONS:
        if section in config:
            yield {
                f"--{name}": "" if value is True else str(value)
                for name, value in config[section].items()
                if value not in (False, None)
            }


def _recipes(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and flags of each recipe's server that decodes. The first such server speaks for a recipe."""
    for path in sorted((folder / "benchmarks").rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix not in (".sh", ".yaml") or "deprecated" in name or _OTHERS.search(name):
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".yaml" and "sglang_config" not in text:
            continue
        read = _of_script if path.suffix == ".sh" else _of_yaml
        for flags in read(text):
            yield name, flags
            break


def _args(flags: dict[str, str]) -> argparse.Namespace:
    """Raw ``ServerArgs`` of a recipe. A value that a shell variable holds counts as 1."""
    parser = argparse.ArgumentParser()
    compat.ServerArgs.add_cli_args(parser)
    actions = {word: action for action in parser._actions for word in action.option_strings}
    args = parser.parse_args(["--model-path", "MODEL"])
    for flag, value in flags.items():
        action: Any = actions.get(flag.split(" ")[0])
        if action is None:
            continue
        setting: Any = value if action.nargs != 0 and value else True
        if action.type in (int, float) and value:
            setting = action.type(value) if re.fullmatch(r"-?[\d.]+", value) else action.type(1)
        setattr(args, action.dest, setting)
    return args


def judge(name: str, flags: dict[str, str]) -> tuple[bool, bool, str]:
    """Whether a recipe's server starts with the plugin, whether it shares, and if not, why."""
    args = _args(flags)
    try:
        refusals.check(args)
    except ValueError as error:
        reasons = re.findall(r"--[a-z0-9-]+", str(error).split(":", 1)[1])
        return False, False, "refuses " + " ".join(dict.fromkeys(reasons))
    if any(part in name.lower() for part in _SPARSE):
        return True, False, "sparse attention"
    backends = {getattr(args, field) for field in compat.ATTENTION_FIELDS} - {None}
    others = sorted(backends - set(compat.CUDA_BACKENDS))
    if others:
        return True, False, f"--attention-backend {' '.join(others)} rotates no keys"
    in_the_way = refusals.in_the_way_of_corrected(args)
    if in_the_way:
        return True, False, f"keys are not rotated with {'; '.join(in_the_way)}"
    return True, True, ""


def main() -> None:
    recipes = list(_recipes(Path(sys.argv[1])))
    verdicts = [(name, *judge(name, flags)) for name, flags in recipes]
    reasons = Counter(reason for *_, reason in verdicts if reason)
    for name, starts, shares, reason in verdicts:
        print("shares" if shares else "starts" if starts else "refused", name, reason, sep="\t")
    starting = sum(verdict[1] for verdict in verdicts)
    sharing = sum(verdict[2] for verdict in verdicts)
    print(f"{len(verdicts)} recipes: {starting} start, {sharing} share")
    for reason, count in reasons.most_common():
        print(f"{count}\t{reason}")
    shared = [flags for (_, flags), verdict in zip(recipes, verdicts, strict=True) if verdict[2]]
    print("Of those that share:")
    for what, holds in _COUNTED.items():
        print(f"{sum(map(holds, shared))}\t{what}")


if __name__ == "__main__":
    main()
