# SPDX-License-Identifier: Apache-2.0
"""SGLang's log lines, as stock and sharing servers of version 0.5.23 wrote them."""

from __future__ import annotations

import pytest

from eval.runs.cells import cut_prompts, moments, retractions

STOCK = """\
[2026-11-21 16:57:55] Prefill batch, #new-seq: 4, #new-token: 180, #cached-token: 0, token usage: 0.00
[2026-11-21 16:57:56] Decode batch, #running-req: 4, #token: 180, token usage: 0.07, cpu graph: False, \
gen throughput (token/s): 5.92, #queue-req: 6
[2026-11-21 16:57:56] INFO:     127.0.0.1:50412 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-11-21 16:57:56] Decode batch, #running-req: 4, #token: 220, token usage: 0.09, cpu graph: False, \
gen throughput (token/s): 290.61, #queue-req: 6
"""
SHARING = """\
[2026-11-21 16:57:10] Decode batch, #running-req: 6, #token: 1016, token usage: 0.42, #shared token: 88, \
cpu graph: False, gen throughput (token/s): 456.49, #queue-req: 4
[2026-11-21 16:57:10] Decode batch, #running-req: 7, #token: 1053, token usage: 0.44, #shared token: 152, \
cpu graph: False, gen throughput (token/s): 265.57, #queue-req: 3
"""
EVICTING = """\
[2026-11-21 21:11:35] Decode batch, #running-req: 1, #token: 448, token usage: 0.19, #shared token: 16, \
#evicted token: 288, cpu graph: False, gen throughput (token/s): 170.57, #queue-req: 0
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (STOCK, [(4, 6, 180, 0, 5.92), (4, 6, 220, 0, 290.61)]),
        (SHARING, [(6, 4, 1016, 88, 456.49), (7, 3, 1053, 152, 265.57)]),
        # Evicted positions are saved too.
        (EVICTING, [(1, 0, 448, 304, 170.57)]),
        ("[2026-11-21 16:57:10] Decode batch, #running-req: 6, #tok", []),
        ("Decode batch, #running-req: 6, #full token: 10, cpu gra", [(6, 0, 10, 0, 0.0)]),
    ],
)
def test_decode_lines(log: str, expected: list[tuple[float, ...]]) -> None:
    found = moments(log, 2)
    figures = [(m.running, m.queued, m.used, m.saved, m.tokens_per_s) for m in found]
    assert figures == expected
    assert [(m.leg, m.step) for m in found] == [(2, step) for step in range(len(expected))]


def test_retractions_add_up() -> None:
    log = "\n".join(f"... #retracted_reqs: {n}, #new_tokens_gained: 9" for n in (2, 3))
    assert retractions(log) == 5
    assert retractions(STOCK) == 0


def test_cut_prompts_count_once_with_several_ranks() -> None:
    said = (
        "Request length is longer than the KV cache pool size or the max context length. Truncated."
    )
    ranks = ("", " TP0", " TP1", " DP1 TP0", " DP1 TP12")
    log = "".join(f"[2026-11-21 16:57:55{rank}] {said} a=1\n" for rank in ranks)
    assert cut_prompts(log) == 3
    assert cut_prompts(STOCK) == 0
