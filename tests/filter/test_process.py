# SPDX-License-Identifier: Apache-2.0
"""Tests the filter process: its results equal a local filter's; it blocks no caller and may die at any time."""

import contextlib
import itertools
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import sglang_reasoncache
from sglang_reasoncache.filter import messages, process, worker
from sglang_reasoncache.filter.messages import StepResult
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import ReasoningSpan
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.structure import Limits
from sglang_reasoncache.filter.vocabulary import Vocabulary
from tests.filter.made_tokenizers import read
from tests.filter.words import Words
from tests.server.faulty.waiting_reasoncache import wait_for

_ROOT = Path(__file__).parents[2]
_CONFIG = FilterConfig(block=2)
_STEP = Words().encode("one two now here \n\n")
_MARKERS = frozenset(Words().encode("<think>")), frozenset(Words().encode("</think>"))

Make = Callable[..., FilterProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as made:

        def start(
            config: FilterConfig = _CONFIG, vocabulary: Vocabulary = Words.vocabulary, **knobs: Any
        ) -> FilterProcess:
            step_filter = FilterProcess(config, vocabulary, **knobs)
            made.callback(step_filter.shut_down)
            return step_filter

        yield start


def feed(step_filter: FilterProcess, requests: Sequence[int], *tokens: Sequence[int]) -> None:
    joined = array("q", itertools.chain.from_iterable(tokens))
    step_filter.feed(array("q", requests), array("q", map(len, tokens)), joined)


def feed_new(step_filter: FilterProcess, tokens: Sequence[int] = _STEP) -> int:
    request = step_filter.open(0, True)
    feed(step_filter, [request], tokens)
    return request


def take_all(step_filter: FilterProcess) -> list[StepResult]:
    assert wait_for(step_filter) == step_filter.outstanding
    return step_filter.take(1 << 20, 1 << 30)


def check_it_works(step_filter: FilterProcess) -> None:
    feed_new(step_filter)
    assert len(take_all(step_filter)) == 1


def wait_until_it_failed(step_filter: FilterProcess) -> None:
    deadline = time.monotonic() + 20
    while step_filter.ready() >= 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_it_ended(pid: int) -> None:
    """Also if nobody has asked yet how it ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        deadline = time.monotonic() + 20
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


_TEXT = (
    "one two now here \n\n <think> p x = 1 now \n\n p x = 1 now \n\n p x = 2 now \n\n a b c d \n\n "
    "</think> one two now here \n\n <think> one two now here </think>"
)


@pytest.mark.parametrize(
    ("knobs", "markers"),
    [
        ({}, None), ({}, _MARKERS), ({"match": "runs", "min_age": 3}, _MARKERS),
        ({"fixed_tau": 0.3, "length_factor": False, "align": "index"}, None),
        ({"fixed_tau": 0.3, "length_factor": False, "align": "nearest", "min_age": 9}, None),
        ({"limits": Limits(max_chars=9), "max_history_steps": 2}, None),
        ({"random_ratio": 0.5}, _MARKERS), ({"structure_tolerance": 1}, None),
    ],
)  # fmt: skip
def test_same_results_as_the_filter_in_this_process(
    make: Make, knobs: dict[str, Any], markers: messages.Markers
) -> None:
    """The filter process, fed in growing pieces, gives the same results as a filter in the test's process."""
    config = FilterConfig(block=2, **knobs)
    span = ReasoningSpan(*markers, True) if markers else None
    local = RequestFilter(config, Words.classes, Words.vocabulary, 5, span)
    tokens = Words().encode(f"{_TEXT} \n\n " * 3)
    step_filter = make(config, markers=markers)
    request = step_filter.open(5, True)
    at = 0
    size = 1
    while at < len(tokens):
        feed(step_filter, [request], tokens[at : at + size])
        at += size
        size += 1
    step_filter.close(request)
    proposals = local.push(tokens)
    assert any(each.alternatives for each in proposals) == (config.align == "nearest")
    expected = [(request, each.pairs, each.counters, each.alternatives) for each in proposals]
    taken = take_all(step_filter)
    assert [
        (each.request, each.pairs, each.counters, each.alternatives) for each in taken
    ] == expected


def test_closed_and_unknown_requests(make: Make) -> None:
    """How many feeds are outstanding and what ``take`` returns depend on calls made, not on time."""
    step_filter = make()
    request = feed_new(step_filter, _STEP * 3)
    step_filter.close(request)
    step_filter.close(request)
    feed(step_filter, [request], _STEP)
    feed(step_filter, [12345, step_filter.open(0, True)], _STEP, _STEP)
    feed(step_filter, [])
    assert step_filter.outstanding == 4
    assert [result.request for result in take_all(step_filter)] == [request] * 3 + [request + 1]
    assert (step_filter.outstanding, step_filter.ready()) == (0, 0)
    request = step_filter.open(0, True)
    for expected in range(1, 7):
        feed(step_filter, [request], _STEP)
        assert step_filter.outstanding == expected
    assert (wait_for(step_filter), step_filter.outstanding) == (6, 6)
    assert [len(result.pairs) for result in step_filter.take(100, max_pairs=3)] == [0, 2, 2]
    assert [len(result.pairs) for result in step_filter.take(2, 99)] == [2, 2]
    assert (step_filter.ready(), step_filter.outstanding) == (1, 1)


def test_a_long_reply_is_taken_in_parts(make: Make) -> None:
    """So that a poll takes a bounded time, however many steps end at once."""
    step_filter = make()
    feed_new(step_filter, _STEP * 7)
    assert wait_for(step_filter) == 1
    assert [len(result.pairs) for result in step_filter.take(1, 3)] == [0, 2, 2]
    assert (step_filter.ready(), step_filter.outstanding) == (1, 1)
    rest = [step_filter.take(1, 3) for _ in range(3)]
    assert [[len(result.pairs) for result in part] for part in rest] == [[2, 2], [2, 2], []]
    assert (step_filter.ready(), step_filter.outstanding) == (0, 0)


def test_prompts_wait_for_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is behind gets no more prompts to index, however many requests arrive."""
    monkeypatch.setattr(process, "_MOST_OF_PROMPTS", 100)
    step_filter = make()
    prompt = array("q", range(60))
    sent = []
    for _ in range(2):
        for _ in range(2):
            step_filter.open(0, True, prompt)
            sent += [len(prompt) for *_, prompt in step_filter._opened.values()]
            feed(step_filter, [])
        take_all(step_filter)
    assert sent == [60, 0, 60, 0]


def test_requests_that_end_before_a_feed_cost_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many short answers after a feed, the next one says nothing. Their prompts leave room for others'."""
    monkeypatch.setattr(process, "_MOST_OF_PROMPTS", 100)
    step_filter = make()
    prompt = array("q", range(60))
    first = feed_new(step_filter)
    for _ in range(50):
        request = step_filter.open(0, True, prompt)
        assert step_filter._opened[request][3] is prompt
        step_filter.join(request, 7)
        step_filter.join(first, 7)
        step_filter.close(request)
    assert not step_filter._opened and not step_filter._closed
    assert step_filter._joined == {first: 7}
    # What this rank closes earlier than others leaves no room before the next feed, as on the other ranks.
    step_filter.close(step_filter.open(0, True, prompt), on_all=False)
    request = step_filter.open(0, True, prompt)
    assert not step_filter._opened[request][3]
    for room in (False, True):
        feed(step_filter, [request], _STEP)
        assert not step_filter._opened and not step_filter._joined
        assert bool(step_filter._opened[step_filter.open(0, True, prompt)][3]) == room
        assert {each.request for each in take_all(step_filter)} <= {first, request}
    step_filter.close(request)
    assert step_filter._closed == [request], "the process knows it"


@pytest.mark.parametrize("hurried", [False, True])
def test_sheds_by_what_was_fed_and_taken(make: Make, hurried: bool) -> None:
    step_filter = make(max_pending=10)
    request = feed_new(step_filter, _STEP * 100)
    if not hurried:
        wait_for(step_filter)
    for steps, shed in ((1, 91), (12, 93)):
        feed(step_filter, [request], _STEP * steps)
        taken = take_all(step_filter)
        assert (len(taken), step_filter.steps_shed) == (10, shed)
    # Steps that were shed (not compared, because too many results waited) are no candidates for later steps.
    assert taken[-1].counters.candidates == 19
    assert taken[0].pairs[0][0] == 101 * len(_STEP)


def test_a_fence_is_followed_through_shed_steps(make: Make) -> None:
    """A code fence (```) opens or closes code even if its step was shed."""
    code = Words().encode("p x = 1 \n\n")
    fence = Words().encode("``` one \n\n")
    step_filter = make(max_pending=1)
    request = step_filter.open(0, True)
    for news in ((code, fence), (fence,), (code,)):
        for tokens in news:
            feed(step_filter, [request], tokens)
        taken = take_all(step_filter)
    (last,) = taken
    assert step_filter.steps_shed == 1
    assert [pair.src_start for pair in last.pairs] == [0, 2]


@pytest.mark.parametrize("when", ["idle", "busy", "on another rank"])
def test_a_process_that_failed_is_started_anew(
    make: Make, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    step_filter = make()
    before = step_filter.pid
    request = feed_new(step_filter, _STEP * (20_000 if when == "busy" else 1))
    if when != "busy":
        take_all(step_filter)
    feed(step_filter, [request], _STEP)
    if when != "on another rank":
        os.kill(step_filter.pid, signal.SIGKILL)
        wait_until_it_failed(step_filter)
        assert step_filter.outstanding == (2 if when == "busy" else 1)
    with caplog.at_level(logging.WARNING):
        step_filter.restart()
    assert "is started anew" in caplog.text
    wait_until_it_ended(before)
    assert (step_filter.outstanding, step_filter.restarts, step_filter.given_up) == (0, 1, False)
    # The new process ignores the tokens of the old request, and compares steps of new requests.
    other = step_filter.open(0, True)
    feed(step_filter, [request, other], _STEP, _STEP * 2)
    assert [(r.request, len(r.pairs)) for r in take_all(step_filter)] == [(other, 0), (other, 2)]


def test_after_three_restarts_it_is_given_up_and_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    step_filter = make()
    for restarts in (1, 2, 3, 3):
        os.kill(step_filter.pid, signal.SIGKILL)
        feed_new(step_filter)
        wait_until_it_failed(step_filter)
        step_filter.restart()
        assert (step_filter.restarts, step_filter.given_up) == (
            restarts,
            caplog.text.count("given up") > 0,
        )
    assert step_filter.given_up and step_filter.pid == 0
    assert caplog.text.count("given up") == 1
    feed_new(step_filter)
    step_filter.close(0)
    assert (step_filter.outstanding, step_filter.ready(), step_filter.take(9, 9)) == (0, 0, [])
    # After ``shut_down``, ``restart`` starts no process, even if the last one had failed unnoticed.
    step_filter = make()
    os.kill(step_filter.pid, signal.SIGKILL)
    step_filter.shut_down()
    step_filter.restart()
    feed_new(step_filter)
    assert (step_filter.ready(), step_filter.pid) == (0, 0)


def test_replies_make_up_for_restarts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that have nothing to do with each other do not end sharing, failures in a row do."""
    monkeypatch.setattr(process, "FORGIVEN_AFTER", 2)
    step_filter = make()

    def fails_after(replies: int) -> bool:
        for _ in range(replies):
            check_it_works(step_filter)
        step_filter.restart()
        return step_filter.given_up

    # Each process answers often enough to make up for one restart, then three do not.
    assert not any(fails_after(replies) for replies in (2, 2, 2, 2, 3, 1, 1))
    assert step_filter.restarts == 7
    assert fails_after(1) and step_filter.restarts == 7


def test_a_stopped_process_holds_nobody_up(make: Make) -> None:
    """No call blocks while the process is stopped. The bytes that wait to be sent to it are limited."""
    step_filter = make()
    request = step_filter.open(0, True)
    os.kill(step_filter.pid, signal.SIGSTOP)
    slowest = 0.0
    for i in range(4000):
        start = time.monotonic()
        feed(step_filter, [request], _STEP * 400)
        ready = step_filter.ready()
        slowest = max(slowest, time.monotonic() - start)
        if ready < 0:
            break
        assert (ready, step_filter.outstanding) == (0, i + 1)
    assert 1500 < i < 3999, "8 MiB of tokens and not more"
    assert slowest < 1.0
    step_filter.restart()
    check_it_works(step_filter)


def test_a_process_that_says_nothing_is_hung(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    step_filter = make()
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.8)
    os.kill(step_filter.pid, signal.SIGSTOP)
    assert step_filter.ready() >= 0, "nothing is asked of it"
    feed_new(step_filter)
    start = time.monotonic()
    wait_until_it_failed(step_filter)
    assert time.monotonic() - start > 0.7
    # After the scheduler paused, it reads replies that came meanwhile before the process can count as hung.
    step_filter.restart()
    feed_new(step_filter)
    monkeypatch.setattr(process, "_LONGEST_PAUSE", 0.5)
    time.sleep(1.0)
    assert step_filter.ready() >= 0


def test_what_came_in_pieces_is_read_and_nonsense_is_a_failure(make: Make) -> None:
    step_filter = make()
    assert step_filter._socket is not None
    # The test answers in place of the child.
    step_filter._socket, theirs = socket.socketpair()
    step_filter._socket.setblocking(False)
    with theirs:
        feed_new(step_filter)
        pickled = pickle.dumps((0, []))
        for byte in messages.LENGTH.pack(len(pickled)) + pickled:
            assert step_filter.ready() == 0
            theirs.sendall(bytes([byte]))
        assert step_filter.ready() == 1
        theirs.sendall(messages.LENGTH.pack(5) + b"words")
        assert step_filter.ready() == -1
        step_filter.restart()
    check_it_works(step_filter)


def test_a_filter_of_another_version_is_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If another version of the package is installed while the server runs, a restart fails and says why."""
    step_filter = make()
    package = shutil.copytree(_ROOT / "sglang_reasoncache", tmp_path / "sglang_reasoncache")
    (package / "__init__.py").write_text('__version__ = "0.0.9"')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    step_filter.restart()
    wait_until_it_failed(step_filter)
    step_filter.restart()
    told = f"it is sglang-reasoncache 0.0.9, this server is {sglang_reasoncache.__version__}"
    assert told in caplog.text
    with pytest.raises(RuntimeError, match="0.0.9"):
        make()


@pytest.mark.parametrize("refused", [(socket, "socketpair"), (subprocess, "Popen")])
def test_a_process_that_cannot_be_started_is_a_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch, refused: tuple[Any, str]
) -> None:
    """If a restart fails, ``ready`` reports a failure. Only a failed first start raises RuntimeError."""
    step_filter = make()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(*refused, refuse)
    step_filter.restart()
    feed_new(step_filter)
    assert step_filter.ready() == -1
    with pytest.raises(RuntimeError, match="cannot be started: no memory"):
        make()
    monkeypatch.undo()
    step_filter.restart()
    check_it_works(step_filter)


def test_modules_of_the_current_folder_are_left_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    check_it_works(make())


def test_a_request_whose_step_raises_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker.Worker(messages.Setup(_CONFIG, Words.vocabulary.pieces, None, 99))
    propose = RequestFilter.propose

    def fails(self: RequestFilter, step: Any) -> Any:
        if step.start >= 100:
            raise IndexError
        return propose(self, step)

    monkeypatch.setattr(RequestFilter, "propose", fails)
    news = [0, 1], [len(_STEP)] * 2, _STEP * 2
    none = array("q")
    for opened in [(0, 100, True, none), (1, 0, True, none)], []:
        num_shed, (result,) = one.answer(messages.Feed(0, opened, [], [], *news))
        assert (num_shed, result.request) == (0, 1)


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
    step_filter = make()
    os.kill(step_filter.pid, signal.SIGINT)
    check_it_works(step_filter)
    child = psutil.Process(step_filter.pid)
    assert step_filter._socket is not None
    step_filter._socket.close()
    assert child.wait(timeout=20) == 0


_PARENT = """
import signal, sys, time
# Ignored in what a shell starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from tests.filter.words import Words
step_filter = FilterProcess(FilterConfig(), Words.vocabulary)
print(step_filter.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-c", _PARENT]
    out = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdout=out, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        # The process that adopts the child may be slow to reap it, and until then the child exists.
        child.wait(timeout=60)


def test_it_loads_neither_torch_nor_sglang(make: Make) -> None:
    """The filter process loads neither torch nor SGLang, not even to unpickle the vocabulary it receives."""
    step_filter = make(vocabulary=read("gpt2"))
    feed_new(step_filter)
    take_all(step_filter)
    child = psutil.Process(step_filter.pid)
    mapped = {Path(part.path).name for part in child.memory_maps()}
    assert not [name for name in mapped if "torch" in name or "cuda" in name or "tvm" in name]
    # The scheduler also imports filter modules, so importing these loads no heavy module, not even SymPy.
    of = "sglang_reasoncache.filter"
    script = f"import sys, {of}.worker, {of}.process, {of}.structure; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"torch", "sglang", "transformers", "scipy", "sympy", "zss"}
    assert not heavy & set(done.stdout.split())
