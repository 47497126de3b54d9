# SPDX-License-Identifier: Apache-2.0
"""Tests that this project and SGLang read each word of the recipes for GPUs (``eval/recipes``)."""

import argparse
from pathlib import Path

import pytest

from eval.methods import find_method
from eval.runs.options import parse
from sglang_reasoncache import compat
from sglang_reasoncache.plugin import flags

RECIPES = sorted(Path("eval/recipes").glob("*.flags"))


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's parser of a server's command line, with our flags."""
    made = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    compat.ServerArgs.add_cli_args(made)
    if "--enable-reasoncache" not in made._option_string_actions:
        flags.add_cli_args(None, made)
    return made


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_command_line_of_ours_and_its_servers_are_of_sglangs(
    path: Path, parser: argparse.ArgumentParser
) -> None:
    head = path.read_text().partition("--model")[0]
    assert f"python -m eval.run @{path}\n" in head and "# Expected:" in head
    options, out = parse([f"@{path}"])
    assert out == Path("out/recipes") / path.stem and f"python -m eval.report {out} " in head
    assert {*options.tasks} == {"aime24", "aime25", "gpqa_diamond", "math500"}
    assert options.kv_budget is not None and options.device == "cuda"
    methods = [find_method(method) for method in options.methods]
    assert methods[0].name == "dense" and {one.shares for one in methods} == {True, False}
    for method in methods:
        words = [*options.server_flags, *method.flags, "--max-total-tokens", "1"]
        read = parser.parse_args(["--model-path", options.model, *words])
        assert read.attention_backend in ("flashinfer", "triton")
        assert read.enable_reasoncache is method.shares


def test_there_is_a_recipe_for_each_of_four_models() -> None:
    assert [path.stem for path in RECIPES] == [
        "gpt-oss-20b", "qwen3-8b", "qwen3.5-9b", "r1-distill-7b",
    ]  # fmt: skip
