# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.run``: tasks x methods x seeds against live servers. See docs/evaluation.md."""

import signal
import sys
from collections.abc import Sequence

from eval.runs.options import parse
from eval.serving import ServerError


def main(argv: Sequence[str] | None = None) -> int:
    """Carry a command out. 0 when every request was answered and graded, 1 when not, 2 for a bad
    command line, 130 after Ctrl-C; the folder holds all that was done."""
    # Unwind, so that servers are closed and records completed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options, out = parse(argv)
    # lm-eval takes seconds to load, for which a mistyped flag should not wait.
    from eval.runs.session import run

    try:
        return 0 if run(options, out) else 1
    except KeyboardInterrupt:
        print("eval.run: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ServerError, ValueError, OSError) as error:
        print(f"eval.run: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
