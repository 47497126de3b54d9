# SPDX-License-Identifier: Apache-2.0
"""Tests ``Repairs`` in SGLang's pools and prefix tree: which tokens of cached documents are computed again,
that their slots are placed where a prefill reads them, and that a failure places nothing."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.cache import repair as module
from sglang_reasoncache.cache.composition import Composition, marked
from sglang_reasoncache.cache.repair import RepairedRow, Repairs, ends_of, highest_of, missed
from sglang_reasoncache.custom_params import KEY, REPAIR_KEY, Repair, repair_of
from sglang_reasoncache.device.ranks import RankFailed, Ranks
from tests.property.world import PROMPT, Setup, World
from tests.unit.test_swap import admitted

pytestmark = pytest.mark.usefixtures("published_config")
DOCUMENTS = [list(range(20, 29)), list(range(40, 46)), list(range(60, 67))]
#: Positions at which the documents begin and end, behind ``PROMPT``.
SPANS = [[6, 15], [15, 21], [21, 28]]
QUERY = [90, 91, 92]
TEXT = [*PROMPT, *(token for document in DOCUMENTS for token in document), *QUERY]


class Prompts(World):
    """A world whose tree holds each document behind ``PROMPT``."""

    def __init__(self, slots: int = 110) -> None:
        super().__init__(Setup(page=1, block=4, slots=slots))
        self.controller.report.documents_off = None
        for number, document in enumerate(DOCUMENTS):
            req = self.request(f"document {number}", [*PROMPT, *document])
            self.prefill(req)
            self.finish(req)

    def marked(self, name: str, repair: str, text: Sequence[int] = TEXT, **options: Any) -> Req:
        """A request that marks the documents, after SGLang has matched its prefix."""
        req = self.request(name, text, **options)
        req.sampling_params.custom_params = {KEY: SPANS, REPAIR_KEY: repair}
        req.sampling_params.max_new_tokens = 0 if name == "scores" else 8
        req.init_next_round_input(self.tree)
        req.extend_end = len(req.full_untruncated_fill_ids)
        assert isinstance(req.last_node, Composition) and req.last_node.length == SPANS[-1][1]
        assert self.tree.reads_shifted([req]), "although no slot was ever shared"
        return req

    def batch_of(self, *reqs: Req) -> Any:
        """A batch whose requests have slots for their new tokens, as before a forward."""
        tokens: list[int] = []
        counts = []
        for req in reqs:
            req.lock = self.tree.lock(req.last_node)
            counts.append(len(self.extend(req)))
            tokens += req.get_fill_ids()[req.prefix_len :]
        return SimpleNamespace(
            reqs=list(reqs),
            extend_lens=counts,
            device="cpu",
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            prefill_input_ids_cpu=torch.tensor(tokens),
        )

    @property
    def repairs(self) -> Repairs:
        found: Repairs = self.allocator.repairs
        return found

    def scored(self, scores: Sequence[float], **options: Any) -> None:
        """Runs a request that only computes scores: ``scores`` of all positions up to the documents' end."""
        req = self.marked("scores", "query:.3", **options)
        batch = self.batch_of(req)
        self.repairs.prepare(batch, self.ranks)
        [repaired] = self.repairs.of(["scores"], batch.extend_lens)
        assert repaired.received is not None and not len(repaired.positions)
        repaired.received.add_(torch.tensor(scores))
        self.finish(req)


@pytest.mark.parametrize("logprobs_from", [None, 28, 30])
@pytest.mark.parametrize(("slots", "repaired"), [(55, 8), (48, 0)])
def test_a_prompt_that_its_repair_would_make_larger_than_the_pool_is_not_repaired(
    slots: int, repaired: int, logprobs_from: int | None
) -> None:
    """Its documents are locked, and the tokens that are computed again take slots beside them. On an idle
    server no slot would ever come, and all other requests wait behind the first."""
    world = Prompts(slots)
    req = world.marked("new", "first:4")
    if logprobs_from is not None:
        # SGLang looks up no token from there on.
        req.return_logprob = True
        req.logprob_start_len = logprobs_from
        req.init_next_round_input(world.tree)
    assert isinstance(req.last_node, Composition) and len(req.last_node.again) == repaired
    assert admitted(world, req) == len(QUERY) + repaired
    req.output_ids.append(1)
    world.finish(req)
    world.assert_empty()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_ends_are_the_first_and_last_tokens_of_all_documents_but_the_first(
    sizes: list[int], first: int, last: int, start: int
) -> None:
    ends = [start + sum(sizes[: number + 1]) for number in range(len(sizes))]
    expected = [
        at
        for begin, end in pairwise(ends)
        for at in range(begin, end)
        if at - begin < first or end - at <= last
    ]
    assert ends_of(ends, first, last).tolist() == expected
    assert repair_of("ends:3") == Repair(first=3, last=6)


@given(st.lists(st.integers(0, 99), max_size=12, unique=True), st.integers(0, 14))
def test_the_highest_scores(scores: list[int], count: int) -> None:
    expected = sorted(sorted(range(len(scores)), key=lambda at: -scores[at])[:count])
    assert highest_of(torch.tensor(scores, dtype=torch.float32), count).tolist() == expected


@given(st.permutations(range(2, 12)), st.lists(st.integers(1, 3), max_size=3))
def test_a_repaired_row_gives_back_the_slots_of_its_chunks(
    order: list[int], chunks: list[int]
) -> None:
    """A prompt of 15 tokens has a cached prefix of 12. The tokens at positions ``again`` are computed again, in
    one prefill or several. SGLang puts their slots from position ``12 - len(again)`` on."""
    again = np.array(sorted(order[: sum(chunks)]), dtype=np.int64)
    start = 12 - len(again)
    cached = torch.arange(100, 112)
    repaired = RepairedRow(cached, start)
    row = torch.cat((cached[:start], torch.zeros(15 - start, dtype=torch.int64))).int()
    own: list[int] = []
    for count in chunks:
        at = start + len(own)
        fresh = list(range(200 + len(own), 200 + len(own) + count))
        # SGLang writes the slots of the chunk behind those of earlier chunks.
        row[at : at + count] = torch.tensor(fresh)
        before = row.clone()
        slots, taken = repaired.placed(row, at, again[len(own) : len(own) + count])
        assert row.equal(before) and taken.tolist() == fresh, "nothing is written yet"
        repaired.place(row, slots, taken)
        own += fresh
        expected = cached.tolist()
        for position, slot in zip(again, own, strict=False):
            expected[position] = slot
        assert row[:12].tolist() == expected
    if own:
        repaired.restore(row)
        assert row[start : start + len(own)].tolist() == own
        assert row[:start].tolist() == [
            own[again.tolist().index(at)] if at in again else 100 + at for at in range(start)
        ]


def test_recomputed_tokens_are_placed_and_given_back() -> None:
    world = Prompts()
    req = world.marked("r", "first:2")
    again = [15, 16, 21, 22]
    assert req.last_node.again.tolist() == again and req.prefix_len == 28 - len(again)
    assert not missed(req, req.last_node)
    batch = world.batch_of(req)
    before = world.row(req).tolist()
    fresh = before[24:28]
    cached = world.tree.prefix_device_indices(req).tolist()
    cached += req.last_node.repaired._slots[24:].tolist()
    world.repairs.prepare(batch, world.ranks)
    expected = list(cached)
    for at, slot in zip(again, fresh, strict=True):
        expected[at] = slot
    assert world.row(req).tolist() == expected + before[28:]
    assert batch.prefill_input_ids_cpu.tolist() == [TEXT[at] for at in again] + QUERY
    [repaired] = world.repairs.of(["r"], [7])
    assert (repaired.number, repaired.token, repaired.new, repaired.least) == (0, 0, 7, 28)
    assert repaired.positions.tolist() == again and repaired.received is None
    world.abort(req)
    world.assert_empty()


def test_two_requests_with_one_id_get_their_own_repairs() -> None:
    """Clients choose ids, and processes that serve HTTP do not know each other's."""
    world = Prompts()
    first = world.marked("same", "first:2")
    second = world.marked("same", "first:1")
    batch = world.batch_of(first, second)
    world.repairs.prepare(batch, world.ranks)
    found = world.repairs.of(["same", "same"], batch.extend_lens)
    assert [(one.number, len(one.positions)) for one in found] == [(0, 4), (1, 2)]
    for req in batch.reqs:
        world.abort(req)
    world.assert_empty()


def test_what_was_prepared_is_told_of_its_batch_only() -> None:
    """Other requests in the batch, ordinary ones too, come before and between. SGLang may pad the counts."""
    world = Prompts()
    plain = world.request("plain", [7, 8, 9])
    plain.init_next_round_input(world.tree)
    plain.extend_end = 3
    first = world.marked("first", "first:2")
    second = world.marked("second", "first:1")
    batch = world.batch_of(plain, first, second)
    assert Repairs().begin(batch) and not Repairs().begin(SimpleNamespace(reqs=[plain]))
    repairs = world.repairs
    repairs.prepare(batch, world.ranks)
    found = repairs.of(["plain", "first", "second"], [*batch.extend_lens, 0, 0])
    assert [(one.number, one.token, one.new) for one in found] == [(1, 3, 7), (2, 10, 5)]
    assert repairs.of(["first", "second"], [7, 5]) == [], "at another index"
    assert [one.number for one in repairs.of(["plain", "first", "second"], [3, 6, 5])] == [2]
    repairs.prepare(SimpleNamespace(reqs=[plain], extend_lens=[1], device="cpu"), world.ranks)
    assert repairs.of(["plain", "first", "second"], batch.extend_lens) == []
    for req in batch.reqs:
        world.abort(req)
    world.assert_empty()


def _failing(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("made up by a test")


@pytest.mark.parametrize("failure", ["other rank", "placing", "scores"])
def test_a_failure_places_nothing(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither now nor later, until a flush: rows and tokens are those of an ordinary prefill."""
    world = Prompts()
    reqs = [world.marked("first", "first:2"), world.marked("second", "first:1")]
    if failure == "scores":
        reqs.append(world.marked("scores", "query:.3"))
    batch = world.batch_of(*reqs)
    rows = [world.row(req).tolist() for req in reqs]
    tokens = batch.prefill_input_ids_cpu.tolist()
    repairs = world.repairs
    with monkeypatch.context() as patch:
        if failure == "other rank":
            patch.setattr(world.ranks, "alone", False)
            patch.setattr(world.ranks, "_ended", True)
            with pytest.raises(RankFailed):
                repairs.prepare(batch, world.ranks)
        else:
            if failure == "placing":
                patch.setattr(reqs[1].last_node.repaired, "placed", _failing)
            else:
                patch.setattr(module.torch, "zeros", _failing)
            with pytest.raises(torch.OutOfMemoryError):
                repairs.prepare(batch, world.ranks)
    for _ in range(2):
        assert repairs.of([req.rid for req in reqs], batch.extend_lens) == []
        assert [world.row(req).tolist() for req in reqs] == rows
        assert batch.prefill_input_ids_cpu.tolist() == tokens
        repairs.prepare(batch, world.ranks)
    again = repairs.choose(reqs[0], reqs[0].last_node, world.ranks)
    assert again.tolist() == [], "later prompts are not repaired"
    for req in reqs:
        world.abort(req)
    world.assert_empty()
    assert world.repairs is not repairs
    again = world.repairs.choose(reqs[0], reqs[0].last_node, world.ranks)
    assert again.tolist() == [15, 16, 21, 22]


SCORES = [float(at * 7 % 28) for at in range(28)]
#: Of 22 tokens of documents 30% are computed again, none of the first document: those with the highest scores.
HIGHEST = sorted(sorted(range(15, 28), key=lambda at: -SCORES[at])[:7])


def forget_choice(req: Req) -> None:
    marks = marked(req)
    assert marks is not None
    marks.chosen_by = None


def test_tokens_that_the_query_attends_to_are_chosen_once_scores_are_known() -> None:
    world = Prompts()
    req = world.marked("r", "query:.3")
    assert req.last_node.again.tolist() == [] and missed(req, req.last_node)
    world.scored(SCORES)
    req = world.marked("r", "query:.3")
    assert req.last_node.again.tolist() == HIGHEST and not missed(req, req.last_node)
    # A waiting request is matched again and again, and keeps its choice.
    world.scored(SCORES[::-1])
    assert world.repairs.choose(req, req.last_node, world.ranks).tolist() == HIGHEST
    other = world.marked("other", "query:.3")
    assert other.last_node.again.tolist() not in ([], HIGHEST)
    ended = Ranks()
    ended.alone = False
    ended._ended = True
    fresh = world.marked("fresh", "query:.3")
    forget_choice(fresh)
    assert world.repairs.choose(fresh, fresh.last_node, ended).tolist() == []


def test_a_choice_is_made_once() -> None:
    """SGLang matches waiting requests again and again, whatever repair they asked for."""
    world = Prompts()
    for repair in ("first:2", "ends:2"):
        req = world.marked(repair, repair)
        first = world.repairs.choose(req, req.last_node, world.ranks)
        assert len(first) and world.repairs.choose(req, req.last_node, world.ranks) is first


@pytest.mark.parametrize(
    "other", [{"text": [*TEXT[:-1], 99]}, {"share": "query:.2"}, {"lora_id": "adapter"}]
)
def test_scores_count_for_the_same_prompt_only(other: dict[str, Any]) -> None:
    world = Prompts()
    world.scored(SCORES)
    req = world.marked("r", other.get("share", "query:.3"), other.get("text", TEXT))
    if "lora_id" in other:
        req.lora_id = other["lora_id"]
        forget_choice(req)
    assert world.repairs.choose(req, req.last_node, world.ranks).tolist() == []


def test_old_scores_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two prompts are kept, and at most 56 tokens, but always the newest prompt."""
    world = Prompts()
    texts = [[*TEXT[:-1], last] for last in (95, 96, 97)]

    def kept() -> list[bool]:
        reqs = [world.marked("r", "query:.3", text) for text in texts]
        return [bool(len(req.last_node.again)) for req in reqs]

    monkeypatch.setattr(module, "_MOST_PROMPTS", 2)
    for text in texts:
        world.scored(SCORES, text=text)
    assert kept() == [False, True, True]
    monkeypatch.setattr(module, "_MOST_TOKENS", 55)
    world.scored(SCORES, text=texts[1])
    assert kept() == [False, True, False]
    monkeypatch.setattr(module, "_MOST_TOKENS", 1)
    world.scored(SCORES, text=texts[0])
    assert kept() == [True, False, False]
