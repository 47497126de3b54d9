# SPDX-License-Identifier: Apache-2.0
"""From a command to a finished run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from eval.methods import Method, find_methods
from eval.runs.config import default_folder, make_config, settle_config
from eval.runs.folder import RunError, locked
from eval.runs.options import RunOptions
from eval.runs.plan import Plan, model_path, request_body
from eval.runs.servers import Servers
from eval.runs.session import Display, Session
from eval.tasks.harness import opens_thinking
from eval.tiny_reasoner import EMBEDDED_SETTINGS


def run(options: RunOptions, out: Path | None, methods: Sequence[Method] | None = None) -> bool:
    """Begin or go on with a run in ``out``, by default a folder named after the options.
    ``methods`` take the place of those that ``options.methods`` stand for, one for each. True when
    every request was answered and graded. Raises ValueError: options or folder are wrong."""
    if options.device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = dataclasses.replace(options, device=device)
    methods = methods or _methods(options)
    plan = Plan(options, request_body(options))
    config = make_config(plan, methods, opens_thinking(model_path(options)))
    folder = out or default_folder(config)
    display = Display()
    with locked(folder):
        config, changed = settle_config(folder, config)
        for what in changed:
            display.say(f"since this run was begun: {what}", "yellow")
        servers = Servers(folder, model_path(options), options.device, options.keep_servers)
        with display, servers:
            whole = Session(folder, config, plan, methods, servers, display).work()
    display.say(f"{folder}: python -m eval.report {folder}")
    return whole


def _methods(options: RunOptions) -> list[Method]:
    methods = find_methods(options.methods, EMBEDDED_SETTINGS if options.embedded else None)
    given = {m.name for m, s in zip(methods, options.methods, strict=True) if s in options.urls}
    for method in methods:
        if method.match in given and method.name not in given:
            what = f"{method.name!r} cannot match {method.match!r}, whose server is given by --url"
            raise RunError(f"--methods: {what}")
    return methods
