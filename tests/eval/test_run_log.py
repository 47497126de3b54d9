# SPDX-License-Identifier: Apache-2.0
"""SGLang's log lines, as stock and sharing servers of version 0.5.23 wrote them."""

from __future__ import annotations

from eval.runs.records import Moment
from eval.server_log import cut_prompts, moments, retractions

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
DROPPING = """\
[2026-11-21 21:11:35] Decode batch, #running-req: 1, #token: 448, token usage: 0.19, #shared token: 16, \
#evicted token: 288, cpu graph: False, gen throughput (token/s): 170.57, #queue-req: 0
"""


def test_stock_lines() -> None:
    assert moments(STOCK, 2) == [
        Moment(leg=2, step=0, running=4, queued=6, used=180, saved=0, tokens_per_s=5.92),
        Moment(leg=2, step=1, running=4, queued=6, used=220, saved=0, tokens_per_s=290.61),
    ]


def test_sharing_lines() -> None:
    assert moments(SHARING, 0) == [
        Moment(leg=0, step=0, running=6, queued=4, used=1016, saved=88, tokens_per_s=456.49),
        Moment(leg=0, step=1, running=7, queued=3, used=1053, saved=152, tokens_per_s=265.57),
    ]


def test_evicted_positions_are_saved_too() -> None:
    [found] = moments(DROPPING, 1)
    assert (found.used, found.saved) == (448, 304)


def test_a_cut_line_is_no_moment() -> None:
    assert moments("[2026-11-21 16:57:10] Decode batch, #running-req: 6, #tok", 0) == []
    (half,) = moments("Decode batch, #running-req: 6, #full token: 10, cpu gra", 0)
    assert (half.used, half.queued, half.tokens_per_s) == (10, 0, 0.0)


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
