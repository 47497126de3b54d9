# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.run`` measures each method on each task and seed on live servers. See docs/evaluation.md."""

import signal
import sys
from collections.abc import Sequence

from eval.runs.options import parse
from eval.serving import ServerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns 0 if every request was answered and graded, 1 if not, 130 after Ctrl-C. Exits
    with 2 if the command line is bad. After an error or Ctrl-C, the run's folder keeps the results so far."""
    # SIGTERM raises SystemExit, so that servers are closed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options, out = parse(argv)
    # This import comes after the flags are checked, because it loads lm-eval, which takes seconds.
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
