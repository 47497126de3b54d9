# SPDX-License-Identifier: Apache-2.0
"""The filter's process: it answers as the filter does, holds nobody up, and may die at any time."""

import contextlib
import itertools
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sglang_reasoncache.filter import messages, process, worker
from sglang_reasoncache.filter.encoder import EmbeddingEncoder
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import ReasoningSpan, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.structure import Limits
from sglang_reasoncache.filter.vocabulary import Vocabulary
from tests.filter.made_tokenizers import made, read, traces
from tests.filter.words import Words

_ROOT = Path(__file__).parents[2]
_CONFIG = FilterConfig(block=2)
_STEP = Words().encode("one two now here \n\n")
_MARKERS = tuple(frozenset(Words().encode(word)) for word in ("<think>", "</think>"))

Make = Callable[..., FilterProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as made:

        def start(
            config: FilterConfig = _CONFIG, vocabulary: Vocabulary = Words.vocabulary, **knobs: Any
        ) -> FilterProcess:
            engine = FilterProcess(config, vocabulary, **knobs)
            made.callback(engine.shut_down)
            return engine

        yield start


def feed(engine: FilterProcess, requests: Sequence[int], *tokens: Sequence[int]) -> None:
    joined = array("q", itertools.chain.from_iterable(tokens))
    engine.feed(array("q", requests), array("q", map(len, tokens)), joined)


def feed_new(engine: FilterProcess, tokens: Sequence[int] = _STEP) -> int:
    request = engine.open(0, True)
    feed(engine, [request], tokens)
    return request


def take_all(engine: FilterProcess) -> list[StepResult]:
    engine.wait()
    assert engine.ready() == engine.outstanding
    return engine.take(1 << 20, 1 << 30)


def check_it_works(engine: FilterProcess) -> None:
    feed_new(engine)
    assert len(take_all(engine)) == 1


def wait_until_it_failed(engine: FilterProcess) -> None:
    deadline = time.monotonic() + 20
    while engine.ready() >= 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def instead_of_the_child(engine: FilterProcess) -> socket.socket:
    """The other end of the engine's socket, after one feed."""
    assert engine._socket is not None
    engine._socket.close()
    engine._socket, theirs = socket.socketpair()
    engine._socket.setblocking(False)
    feed_new(engine)
    return theirs


def assert_same(
    engine: FilterProcess, local: RequestFilter, tokens: Sequence[int]
) -> list[StepResult]:
    """What the process finds, fed in pieces of growing size, is what a filter here finds."""
    request = engine.open(5, True)
    at, size = 0, 1
    while at < len(tokens):
        feed(engine, [request], tokens[at : at + size])
        at, size = at + size, size + 1
    engine.close(request)
    taken = take_all(engine)
    found = [(r.start, r.end, [*map(tuple, r.pairs)], r.counters) for r in taken]
    assert found == [
        (p.step.start, p.step.end, [pair[:2] for pair in p.pairs], p.counters)
        for p in local.push(tokens)
    ]
    return taken


_TEXT = (
    "one two now here \n\n <think> p x = 1 now \n\n p x = 1 now \n\n p x = 2 now \n\n a b c d \n\n "
    "</think> one two now here \n\n <think> one two now here </think>"
)


@pytest.mark.parametrize(
    ("knobs", "markers"),
    [
        ({}, ()), ({}, _MARKERS), ({"fixed_tau": 0.3, "length_factor": False, "align": "index"}, ()),
        ({"limits": Limits(max_chars=9), "max_history_steps": 2}, ()),
        ({"page_size": 2, "soft": 0.0, "use_structure": False}, ()),
        ({"random_ratio": 0.5, "seed": 3}, _MARKERS), ({"structure_tolerance": 1}, ()),
        ({"encoder": "embedding"}, ()),
    ],
)  # fmt: skip
def test_same_results_as_the_filter_in_this_process(
    make: Make, knobs: dict[str, Any], markers: tuple[frozenset[int], ...]
) -> None:
    config = FilterConfig(block=2, **knobs)
    tokens = Words().encode(f"{_TEXT} \n\n " * 3)
    matrix, encoder = None, None
    if "encoder" in knobs:
        rng = np.random.default_rng(0)
        matrix = rng.normal(size=(len(Words.vocabulary.pieces), 8)).astype(np.float32)
        encoder = EmbeddingEncoder(matrix)
    span = ReasoningSpan(markers[0], markers[1], True) if markers else None
    local = RequestFilter(config, Words.classes, Words.vocabulary, 5, span, encoder)
    assert_same(make(config, markers=markers or None, embedding=matrix), local, tokens)


def test_same_results_on_real_responses(make: Make) -> None:
    if not traces():
        pytest.skip("no traces: set REASONCACHE_TRACES to a folder of JSONL files")
    config, vocabulary, steps = FilterConfig(block=8), read("gpt2"), 0
    engine = make(config, vocabulary, max_pending=1 << 20)
    for text in sorted(traces(), key=len)[:: len(traces()) // 12]:
        local = RequestFilter(config, TokenClasses(vocabulary), vocabulary, 5)
        steps += len(assert_same(engine, local, made("gpt2").encode(text)))
    assert steps > 500


def test_many_requests_come_back_in_order(make: Make) -> None:
    engine = make(max_pending=1 << 20)
    requests = [engine.open(i, True) for i in range(50)]
    for _ in range(20):
        feed(engine, requests, *[_STEP] * len(requests))
    found = take_all(engine)
    assert [result.request for result in found] == requests * 20
    for request in requests:
        starts = [r.start for r in found if r.request == request]
        assert starts == [request + len(_STEP) * i for i in range(20)]


def test_closed_and_unknown_requests(make: Make) -> None:
    """What is outstanding does not depend on time, nor what is taken at once."""
    engine = make()
    request = feed_new(engine, _STEP * 3)
    engine.close(request)
    engine.close(request)
    feed(engine, [request], _STEP)
    feed(engine, [12345, engine.open(0, True)], _STEP, _STEP)
    feed(engine, [])
    assert engine.outstanding == 4
    assert [result.request for result in take_all(engine)] == [request] * 3 + [request + 1]
    assert (engine.outstanding, engine.ready()) == (0, 0)
    request = engine.open(0, True)
    for expected in range(1, 7):
        feed(engine, [request], _STEP)
        assert engine.outstanding == expected
    engine.wait()
    assert (engine.ready(), engine.outstanding) == (6, 6)
    assert [len(result.pairs) for result in engine.take(100, max_pairs=3)] == [0, 2, 2]
    assert [len(result.pairs) for result in engine.take(2, 99)] == [2, 2]
    assert (engine.ready(), engine.outstanding) == (1, 1)


@pytest.mark.parametrize("hurried", [False, True])
def test_sheds_by_what_was_fed_and_taken(make: Make, hurried: bool) -> None:
    engine = make(max_pending=10)
    request = feed_new(engine, _STEP * 100)
    if not hurried:
        engine.wait()
    for steps, shed in ((1, 91), (12, 93)):
        feed(engine, [request], _STEP * steps)
        taken = take_all(engine)
        assert (len(taken), engine.steps_shed) == (10, shed)
    # Steps that were shed are no candidates.
    assert taken[-1].counters.candidates == 19
    assert taken[0].start == 101 * len(_STEP)


def test_a_fence_is_followed_through_shed_steps(make: Make) -> None:
    """A fence in a step that nobody compared still opens and closes code."""
    code, fence = Words().encode("p x = 1 \n\n"), Words().encode("``` one \n\n")
    engine = make(max_pending=1)
    request = engine.open(0, True)
    for news in ((code, fence), (fence,), (code,)):
        for tokens in news:
            feed(engine, [request], tokens)
        taken = take_all(engine)
    (last,) = taken
    assert engine.steps_shed == 1
    assert [pair.src_start for pair in last.pairs] == [0, 2]


@pytest.mark.parametrize("when", ["idle", "busy", "on another rank"])
def test_a_process_that_failed_is_started_anew(
    make: Make, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    before = engine.pid
    request = feed_new(engine, _STEP * (20_000 if when == "busy" else 1))
    if when != "busy":
        take_all(engine)
    feed(engine, [request], _STEP)
    if when != "on another rank":
        os.kill(engine.pid, signal.SIGKILL)
        wait_until_it_failed(engine)
        assert engine.outstanding == (2 if when == "busy" else 1)
    with caplog.at_level(logging.WARNING):
        engine.restart()
    assert "is started anew" in caplog.text and not psutil.pid_exists(before)
    assert (engine.outstanding, engine.restarts, engine.given_up) == (0, 1, False)
    # It knows nothing of the request that ran, and follows new ones.
    other = engine.open(0, True)
    feed(engine, [request, other], _STEP, _STEP * 2)
    assert [(r.request, len(r.pairs)) for r in take_all(engine)] == [(other, 0), (other, 2)]


def test_after_three_restarts_it_is_given_up_and_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    for restarts in (1, 2, 3, 3):
        os.kill(engine.pid, signal.SIGKILL)
        feed_new(engine)
        wait_until_it_failed(engine)
        engine.restart()
        assert (engine.restarts, engine.given_up) == (restarts, caplog.text.count("given up") > 0)
    assert engine.given_up and engine.pid == 0
    assert caplog.text.count("given up") == 1
    feed_new(engine)
    engine.close(0)
    assert (engine.outstanding, engine.ready(), engine.take(9, 9)) == (0, 0, [])


def test_once_ended_it_starts_no_process(make: Make) -> None:
    """Also after a failure that was seen too late."""
    engine = make()
    os.kill(engine.pid, signal.SIGKILL)
    feed_new(engine)
    wait_until_it_failed(engine)
    engine.shut_down()
    engine.restart()
    feed_new(engine)
    assert (engine.ready(), engine.pid) == (0, 0)


def test_a_stopped_process_holds_nobody_up(make: Make) -> None:
    """Nothing blocks while it stands still, and what it was sent is bounded."""
    engine = make()
    request = engine.open(0, True)
    os.kill(engine.pid, signal.SIGSTOP)
    slowest = 0.0
    for i in range(4000):
        start = time.monotonic()
        feed(engine, [request], _STEP * 100)
        ready = engine.ready()
        slowest = max(slowest, time.monotonic() - start)
        if ready < 0:
            break
        assert (ready, engine.outstanding) == (0, i + 1)
    assert 1500 < i < 3999, "8 MiB of tokens and not more"
    assert slowest < 1.0
    engine.restart()
    check_it_works(engine)


def test_a_process_that_says_nothing_is_hung(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.3)
    os.kill(engine.pid, signal.SIGSTOP)
    assert engine.ready() >= 0, "nothing is asked of it"
    feed_new(engine)
    start = time.monotonic()
    wait_until_it_failed(engine)
    assert time.monotonic() - start > 0.25
    # A pause of the scheduler itself is no silence of the process.
    engine.restart()
    feed_new(engine)
    time.sleep(0.5)
    assert engine.ready() >= 0


_GOOD = [22, 1, 0, 1, 0, 0, 5, 7, 1, 1, *[0] * 7, 2, 0, 4, 3, 9]


@pytest.mark.parametrize(
    "words",
    [
        [0, 1, 0, 0], [-7, 1, 0, 0], [1 << 40, 1, 0, 0], [4, 2, 0, 0], [4, 1, 0, 1], [4, 1, 0, -1],
        [4, 1, 0, 1 << 60], [4, 1, 0, 0, 4, 2, 0, 0], [0x6F72206E6F206E6F] * 9,
        [*_GOOD[:6], 0, *_GOOD[7:]], *([*_GOOD[:8], pairs, *_GOOD[9:]] for pairs in (2, -1, 1 << 60)),
        *([*_GOOD[:9], across, *_GOOD[10:]] for across in (2, 0, -1, 1 << 60)),
    ],
)  # fmt: skip
def test_a_reply_that_cannot_be_is_a_failure(make: Make, words: list[int]) -> None:
    engine = make()
    with instead_of_the_child(engine) as theirs:
        theirs.sendall(array("q", words).tobytes())
        assert engine.ready() == -1
        engine.restart()
    check_it_works(engine)


def test_a_reply_in_pieces_is_read_and_waiting_polls(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    with instead_of_the_child(engine) as theirs:
        for byte in array("q", _GOOD).tobytes():
            assert engine.ready() == 0
            theirs.sendall(bytes([byte]))
        assert engine.ready() == 1
        (result,) = engine.take(1, 1)
    assert (result.start, result.end, result.pairs) == (0, 5, ((2, 0),))
    assert result.across == ((4, 3, 9),)
    monkeypatch.setenv(process.WAIT_ENV, "1")
    engine = make()
    feed_new(engine, _STEP * 500)
    assert engine.ready() == 1


@pytest.mark.parametrize("refused", [(socket, "socketpair"), (subprocess, "Popen")])
def test_a_process_that_cannot_be_started_is_a_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch, refused: tuple[Any, str]
) -> None:
    """And an exception only at the server's start."""
    engine = make()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(*refused, refuse)
    engine.restart()
    feed_new(engine)
    assert engine.ready() == -1
    with pytest.raises(RuntimeError, match="cannot be started: no memory"):
        make()
    monkeypatch.undo()
    engine.restart()
    check_it_works(engine)


def test_more_open_files_than_select_knows_and_modules_of_the_current_folder(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    check_it_works(make())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip(f"this process may have {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        check_it_works(make())
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_whose_step_raises_costs_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker.Worker(f"/proc/self/fd/{make()._files[0]}")
    propose = RequestFilter.propose

    def fails(self: RequestFilter, step: Any) -> Any:
        if step.start >= 100:
            raise IndexError
        return propose(self, step)

    monkeypatch.setattr(RequestFilter, "propose", fails)
    none, opened = array("q"), array("q", (0, 100, 1, 1, 0, 1))
    news = array("q", (0, 1)), array("q", [len(_STEP)] * 2), array("q", [*_STEP, *_STEP])
    for number, opening in enumerate((opened, none), start=1):
        answer = array("q", one.answer(messages.Feed(0, opening, none, none, *news), number))
        _, _, shed, steps = answer[: messages.REPLY_HEADER]
        assert (shed, steps, answer[messages.REPLY_HEADER]) == (0, 1, 1)


def test_a_sentence_model_that_is_not_there_is_told_at_the_start(make: Make) -> None:
    with pytest.raises(ValueError, match="^--reasoncache-set encoder=sentence-bert "):
        make(FilterConfig(encoder="sentence-bert"), sentence_model="/nowhere")


def test_it_is_nice_where_it_may_not_choose_how_it_is_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    nice: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    monkeypatch.setattr(os, "nice", nice.append)
    worker._stand_back()
    assert nice == [10]


def test_a_terminals_interrupt_does_not_end_it_but_the_end_of_its_input(make: Make) -> None:
    engine = make()
    os.kill(engine.pid, signal.SIGINT)
    check_it_works(engine)
    child = psutil.Process(engine.pid)
    assert engine._socket is not None
    engine._socket.close()
    assert child.wait(timeout=20) == 0


_PARENT = """
import signal, sys, time
# Ignored in what a shell starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from tests.filter.words import Words
engine = FilterProcess(FilterConfig(), Words.vocabulary)
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command, out = [sys.executable, "-c", _PARENT], subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdout=out, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        # Somebody else may be slow to reap it.
        child.wait(timeout=60)


def test_it_loads_neither_torch_nor_sglang(make: Make) -> None:
    mapped = {Path(part.path).name for part in psutil.Process(make().pid).memory_maps()}
    assert not [name for name in mapped if "torch" in name or "cuda" in name]
    script = "import sys, sglang_reasoncache.filter.worker; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "sglang", "transformers", "scipy"} & set(done.stdout.split())
