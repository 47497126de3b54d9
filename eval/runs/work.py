# SPDX-License-Identifier: Apache-2.0
"""From a command to a finished run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from eval.methods import find_method
from eval.runs.config import default_folder, make_config, settle_config
from eval.runs.folder import locked
from eval.runs.options import RunOptions
from eval.runs.plan import Plan, model_path, request_body
from eval.runs.servers import Servers
from eval.runs.session import Session, say
from eval.tasks.harness import opens_thinking
from eval.tiny_reasoner import EMBEDDED_SETTINGS


def run(
    options: RunOptions, out: Path | None, more: Mapping[str, tuple[str, ...]] | None = None
) -> bool:
    """Begin or go on with a run in ``out``, by default a folder named after the options. ``more``:
    further flags of the servers of some methods. True when every request was answered and graded.
    Raises ValueError: options or folder are wrong."""
    if options.device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = dataclasses.replace(options, device=device)
    own = EMBEDDED_SETTINGS if options.embedded else None
    methods = [
        dataclasses.replace(find_method(spec, own), more=(more or {}).get(spec, ()))
        for spec in options.methods
    ]
    model = model_path(options)
    plan, opens = Plan(options, request_body(options)), opens_thinking(model)
    config = make_config(plan, methods, opens)
    folder = out or default_folder(config)
    with locked(folder):
        settle_config(folder, config)
        with Servers(folder, model, options.device, options.keep_servers) as servers:
            whole = Session(folder, plan, methods, servers, opens).work()
    say(f"{folder}: python -m eval.report {folder}")
    return whole
