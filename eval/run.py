# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.run``: tasks x methods x seeds against live servers. See docs/evaluation.md."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from eval.methods import MethodError
from eval.runs.command_line import parse
from eval.runs.folder import RunError
from eval.runs.work import carry_out
from eval.serving import ServerError
from eval.tasks.sandbox import SandboxError
from eval.tasks.task import TaskError


def main(argv: Sequence[str] | None = None) -> int:
    """Carry a command out.

    Returns:
        Exit status: 0 when every request was answered and graded, 1 when not, 2 for a bad
        command line, 130 after Ctrl-C. Whatever it is, the folder holds all that was done.
    """
    # Unwind, so that servers are closed and records completed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = parse(argv)
    try:
        return 0 if carry_out(command) else 1
    except KeyboardInterrupt:
        print("eval.run: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (RunError, TaskError, MethodError, ServerError, SandboxError, OSError) as error:
        print(f"eval.run: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
