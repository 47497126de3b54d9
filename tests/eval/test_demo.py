# SPDX-License-Identifier: Apache-2.0
"""The demo's command line."""

from __future__ import annotations

from eval.demo import parse, run_options


def test_single_flags_are_values() -> None:
    options = parse(["--both", "--tp=2", "--shared", "--reasoncache-admission-credit 0"])
    assert options.shared == ["--reasoncache-admission-credit", "0"]
    assert run_options(options).server_flags == ("--tp=2",)
