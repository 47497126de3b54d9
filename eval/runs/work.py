# SPDX-License-Identifier: Apache-2.0
"""From a command to a finished run: what is needed is put together here."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from eval.methods import Method, find_methods
from eval.runs.config import check_same, default_folder, make_config, options_of, settle_config
from eval.runs.folder import RunError, cells, locked, read_config
from eval.runs.options import Command, RunOptions
from eval.runs.plan import Plan, model_path, request_body
from eval.runs.servers import Servers
from eval.runs.session import Display, Session, grade, summary
from eval.tasks.harness import opens_thinking
from eval.tasks.sandbox import SandboxError
from eval.tiny_reasoner import EMBEDDED_SETTINGS


def carry_out(command: Command) -> bool:
    """Run, resume or grade; True when every request was answered and graded. Raises ValueError:
    command or folder is wrong; ServerError."""
    if command.grade is not None:
        return grade_again(command.grade, command.allow_code_execution)
    if command.resume is not None:
        return run(options_of(read_config(command.resume)), command.resume)
    assert command.options is not None
    return run(command.options, command.out)


def run(options: RunOptions, out: Path | None, methods: Sequence[Method] | None = None) -> bool:
    """Begin or go on with a run in ``out``, by default a folder named after the options.
    ``methods`` take the place of those that ``options.methods`` stand for, one for each."""
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


def grade_again(folder: Path, allow_code: bool) -> bool:
    """Grade the responses of a run again; no server is needed. True when every problem of every
    cell is answered and could be graded."""
    there = read_config(folder)
    options = options_of(there)
    allowed = options.allow_code_execution or allow_code
    plan = Plan(dataclasses.replace(options, allow_code_execution=allowed), there["sampling"])
    now = make_config(plan, _methods(options), bool(there["opens_thinking"]))
    same = ("data", "problems")
    check_same(folder, {key: there.get(key) for key in same}, {key: now[key] for key in same})
    display, whole = Display(), True
    with locked(folder):
        for cell in cells(folder):
            cell.mend()
            title = f"{cell.task}, {cell.method}, seed {cell.seed}"
            task = plan.tasks[cell.task, cell.seed]
            try:
                results = grade(cell, task, there["opens_thinking"])
            except SandboxError as error:
                # What one task's grader lacks must not cost the others theirs.
                display.say(f"{title}: not graded: {error}", "red")
                whole = False
                continue
            display.say(summary(title, results, None))
            missing = len(task.problems) - len(cell.answered())
            if missing:
                display.say(f"{title}: {missing} problems are not answered", "yellow")
                whole = False
    return whole


def _methods(options: RunOptions) -> list[Method]:
    methods = find_methods(options.methods, EMBEDDED_SETTINGS if options.embedded else None)
    given = {m.name for m, s in zip(methods, options.methods, strict=True) if s in options.urls}
    for method in methods:
        if method.match in given and method.name not in given:
            what = f"{method.name!r} cannot match {method.match!r}, whose server is given by --url"
            raise RunError(f"--methods: {what}")
    return methods
