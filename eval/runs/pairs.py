# SPDX-License-Identifier: Apache-2.0
"""PD disaggregation: the servers of a run decode, behind SGLang's router, what one prefill server computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from eval.router import Router, of_pair
from eval.serving import ServerProcess, free_port

#: Flags of every decode server.
DECODES = ("--disaggregation-mode", "decode")


class Prefills:
    """The stock prefill server of a run. ``logs``: folder of its log; ``flags``: further flags."""

    def __init__(
        self,
        logs: Path,
        model_path: str | Path,
        device: Literal["cpu", "cuda"],
        flags: Sequence[str],
        start_timeout_s: float,
    ) -> None:
        self._logs = logs
        self._bootstrap = str(free_port())
        words = ("--disaggregation-mode", "prefill")
        self.process = ServerProcess(
            model_path,
            flags=(*words, "--disaggregation-bootstrap-port", self._bootstrap, *flags),
            log_path=logs / "prefill.log",
            device=device,
            start_timeout_s=start_timeout_s,
        )

    def start(self) -> Self:
        """Raises ServerError if the server does not start."""
        self.process.start()
        return self

    def route(self, decode: ServerProcess) -> Router:
        """A running router that sends each request to the prefill server and to ``decode``. Raises ServerError
        if it does not start."""
        words = of_pair(self.process.url, self._bootstrap, decode.url)
        return Router(words, self._logs / f"router-of-{decode.log_path.name}")
