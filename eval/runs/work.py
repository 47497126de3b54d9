# SPDX-License-Identifier: Apache-2.0
"""From a command to a finished run: what is needed is put together here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from eval.methods import find_methods
from eval.runs.command_line import Command
from eval.runs.config import check_same, default_folder, make_config, settle_config
from eval.runs.folder import RunError, cells, read_config
from eval.runs.grading import grade_cell
from eval.runs.lock import locked
from eval.runs.options import RunOptions, from_config
from eval.runs.problems import ProblemSet, model_path
from eval.runs.progress import Display
from eval.runs.room import refuse_what_cannot_fit
from eval.runs.servers import Servers
from eval.runs.session import Session, summary
from eval.tasks.registry import find_task
from eval.tasks.sampling import sampling_for
from eval.tasks.sandbox import SandboxError
from eval.tasks.task import TaskError
from eval.tasks.thinking import opens_thinking
from eval.tiny_reasoner import EMBEDDED_FLAGS


def carry_out(command: Command) -> bool:
    """Run, resume or grade; True when every request was answered and graded.

    Raises:
        RunError, TaskError, MethodError: the command or the folder is wrong.
        ServerError: a server did not start, or died.
    """
    if command.grade is not None:
        return grade(command.grade, command.allow_code_execution)
    if command.resume is not None:
        return run(from_config(read_config(command.resume)), command.resume)
    assert command.options is not None
    return run(command.options, command.out)


def run(options: RunOptions, out: Path | None) -> bool:
    """Begin or go on with a run in ``out``, by default a folder named after the options."""
    options = dataclasses.replace(options, device=resolve_device(options.device))
    methods = find_methods(options.methods, EMBEDDED_FLAGS if options.embedded else ())
    given = {m.name for m, s in zip(methods, options.methods, strict=True) if s in options.urls}
    for method, spec in zip(methods, options.methods, strict=True):
        if method.match in given and method.name not in given:
            raise RunError(
                f"--methods: {spec!r} cannot match {method.match!r}, whose server is given by --url"
            )
    problems = ProblemSet(options, {name: find_task(name) for name in options.tasks})
    if options.kv_budget is not None:
        for name in options.tasks:
            refuse_what_cannot_fit(problems, name, options.kv_budget)
    body = request_body(options)
    thinks = opens_thinking(model_path(options))
    config = make_config(options, methods, problems.all_measured, body, thinks)
    folder = out or default_folder(config)
    display = Display()
    with locked(folder):
        config, changed = settle_config(folder, config)
        for what in changed:
            display.say(f"since this run was begun: {what}", "yellow")
        path = model_path(options)
        with (
            display.shown(),
            Servers(folder, path, options.device, options.keep_servers) as servers,
        ):
            session = Session(folder, config, problems, methods, body, servers, display)
            whole = session.work()
    display.say(f"{folder}: python -m eval.report {folder}")
    return whole


def grade(folder: Path, allow_code: bool) -> bool:
    """Grade the responses of a run again; no server is needed.

    True when every problem of every cell is answered and could be graded.
    """
    there = read_config(folder)
    options = from_config(there)
    loaded = dataclasses.replace(
        options, allow_code_execution=options.allow_code_execution or allow_code
    )
    methods = find_methods(options.methods, EMBEDDED_FLAGS if options.embedded else ())
    problems = ProblemSet(loaded, {name: find_task(name) for name in options.tasks})
    thinks = there.get("opens_thinking")
    if thinks is None:
        thinks = opens_thinking(model_path(options))
    now = make_config(options, methods, problems.all_measured, there["sampling"], thinks)
    same = ("data", "problems")
    check_same(folder, {key: there.get(key) for key in same}, {key: now[key] for key in same})
    display, whole = Display(), True
    with locked(folder):
        for cell in cells(folder):
            cell.mend()
            asked = problems.measured(cell.task, cell.seed)
            title = f"{cell.task}, {cell.method}, seed {cell.seed}"
            try:
                results = grade_cell(cell, problems.task(cell.task), asked, thinks)
            except (TaskError, SandboxError) as error:
                # What one task's grader lacks must not cost the others theirs.
                display.say(f"{title}: not graded: {error}", "red")
                whole = False
                continue
            display.say(summary(title, results, None))
            missing = len(asked) - len(cell.answered())
            if missing:
                display.say(f"{title}: {missing} problems are not answered", "yellow")
                whole = False
    return whole


def request_body(options: RunOptions) -> dict[str, Any]:
    """The sampling part of each request: the model family's own, and what was set by hand."""
    body = {**sampling_for(options.model).to_body(), **options.sampling_overrides}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    return body


def resolve_device(device: str) -> str:
    """``cuda`` if asked for, or if torch sees a GPU and nothing was asked for."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
