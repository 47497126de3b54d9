# SPDX-License-Identifier: Apache-2.0
"""Random operations on *composed* prompts (their documents' KV is cached). No slot in a row may be freed, no
slot may be lost, no row may read KV of another salt, and a waiting request must find what is cached now. A
*content* is a number that stands for KV."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache.cache.composition import CachedDocuments, Composition
from sglang_reasoncache.cache.repair import _key
from sglang_reasoncache.custom_params import KEY, OPT_OUT_KEY, REPAIR_KEY, Documents
from tests.property.world import MAX_ROWS, PROMPT, Setup, World

#: Tokens of documents that follow the *base* ``PROMPT``. Two begin alike, and three contain tokens 21 and 22.
DOCUMENTS = [
    list(range(20, 29)),
    [40, *range(21, 26)],
    list(range(60, 72)),
    [80, 81],
    [20, 21, 22, 50],
]
#: Beginnings of documents. Their look-ups split nodes.
BEGINNINGS = [[20, 21], [60], DOCUMENTS[0][:-1]]
QUERY = [90, 91, 92, 93]
SALTS = (None, "other")


def _spans(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """The spans of ``documents`` in a prompt that begins with ``PROMPT``."""
    bounds = itertools.accumulate(map(len, documents), initial=len(PROMPT))
    return [list(span) for span in itertools.pairwise(bounds)]


class Composing(RuleBasedStateMachine):
    """Composes prompts at random. ``running``: requests, each with the contents that its row must show.
    ``waiting``: requests that are looked up, but not prefilled. ``core``: SGLang's ``tree_core_backend``."""

    core = "python"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Setup(page=1, block=4, slots=110, core=self.core))
        self.world.controller.report.documents_off = None
        self.running: list[tuple[Req, list[int]]] = []
        self.waiting: list[Req] = []
        self._contents = itertools.count(1)
        #: (salt, number of a document) -> contents of base and document at their last prefill.
        self.documents: dict[tuple[str | None, int], list[int]] = {}

    def _request(self, prompt: Sequence[int], salt: str | None, **custom: Any) -> Req:
        req = self.world.request("r", prompt, salt=salt)
        req.sampling_params.custom_params = custom or None
        return req

    def _prefill(self, req: Req) -> list[int] | None:
        """Prefill what the tree lacks. Return the contents of the row's slots, or None if there is no room."""
        world = self.world
        req.init_next_round_input(world.tree)
        req.extend_end = len(req.full_untruncated_fill_ids)
        req.lock = world.tree.lock(req.last_node)
        free = world.allocator.available_size() + world.tree.evictable_size()
        if free < req.extend_len or len(self.running) == MAX_ROWS - 1:
            world.tree.unlock(req.lock)
            return None
        slots = world.extend(req)
        batch = SimpleNamespace(
            reqs=[req],
            extend_lens=[len(slots)],
            device="cpu",
            req_to_token_pool=world.rows,
            tree_cache=world.tree,
            prefill_input_ids_cpu=torch.tensor(req.get_fill_ids()[req.prefix_len :]),
        )
        repairs = world.allocator.repairs
        # A request for 0 new tokens only scores attention. Scores from before a retraction must not count.
        if req.sampling_params.max_new_tokens == 0:
            repairs.prepare(SimpleNamespace(**{**vars(batch), "extend_lens": [1]}), world.ranks)
        for repaired in repairs.of([req.rid], [1]):
            if repaired.received is not None:
                repaired.received.add_(1)
        repairs.prepare(batch, world.ranks)
        positions = list(range(req.prefix_len, req.extend_end))
        for repaired in repairs.of([req.rid], [len(slots)]):
            positions[: len(repaired.positions)] = repaired.positions.tolist()
        text = [*req.origin_input_ids, *req.output_ids]
        assert batch.prefill_input_ids_cpu.tolist() == [text[at] for at in positions]
        row = world.row(req)
        assert row[positions].tolist() == slots.tolist(), "written where the row names it"
        world.write(slots, [next(self._contents) for _ in slots])
        world.written_at[slots] = positions
        for repaired in repairs.of([req.rid], [len(slots)]):
            if repaired.received is not None:
                assert not repaired.received.any()
                repaired.received.add_(torch.rand(len(repaired.received)))
        checkpoint_kv_cache(req, world.tree)
        return world.contents()[world.row(req)].tolist()

    def _publish(self, number: int, salt: str | None) -> None:
        """Prefill a document, if there is room."""
        req = self._request([*PROMPT, *DOCUMENTS[number]], salt)
        shown = self._prefill(req)
        if shown is not None:
            self.world.finish(req)
            self.documents[salt, number] = shown

    @rule(
        order=st.permutations(range(len(DOCUMENTS))).map(lambda order: order[:3]),
        salt=st.sampled_from(SALTS),
        repair=st.sampled_from(["none", "first:2", "ends:1", "query:.3"]),
        opts_out=st.booleans(),
        scores=st.booleans(),
    )
    def ask(
        self, order: list[int], salt: str | None, repair: str, opts_out: bool, scores: bool
    ) -> None:
        world = self.world
        prompt = list(PROMPT)
        for number in order:
            self._publish(number, salt)
            prompt += DOCUMENTS[number]
        spans = _spans([DOCUMENTS[number] for number in order])
        custom = {KEY: spans, REPAIR_KEY: repair, **({OPT_OUT_KEY: False} if opts_out else {})}
        if repair.startswith("query") and scores:
            scoring = self._request([*prompt, *QUERY], salt, **custom)
            scoring.sampling_params.max_new_tokens = 0
            if self._prefill(scoring) is not None:
                world.finish(scoring)
        req = self._request([*prompt, *QUERY], salt, **custom)
        missed = world.controller.stats.repairs_missed
        shown = self._prefill(req)
        if shown is None:
            return
        prefix = req.last_node
        missed = world.controller.stats.repairs_missed - missed
        if isinstance(prefix, Composition):
            assert not opts_out
            assert missed == (repair != "none" and not len(prefix.again))
            kept = set(range(prefix.length)) - set(prefix.again.tolist())
            for number, (start, end) in list(zip(order, spans, strict=True))[: len(prefix.nodes)]:
                own = self.documents[salt, number][len(PROMPT) :]
                for at in kept & set(range(start, end)):
                    assert shown[at] == own[at - start], "the salt's own document"
        req.output_ids.append(7)
        self.running.append((req, shown))

    @rule(
        order=st.permutations(range(len(DOCUMENTS))),
        beginning=st.sampled_from([*BEGINNINGS, []]),
        salt=st.sampled_from(SALTS),
    )
    def wait(self, order: list[int], beginning: list[int], salt: str | None) -> None:
        """A request waits, after three of its documents were prefilled, as far as there is room."""
        for number in order[:3]:
            self._publish(number, salt)
        marked = [DOCUMENTS[number] for number in order[:4]]
        marked += [beginning] if beginning else []
        prompt = [*PROMPT, *itertools.chain(*marked), *QUERY]
        self.waiting.append(self._request(prompt, salt, **{KEY: _spans(marked)}))
        self.look_up()

    @rule()
    def look_up(self) -> None:
        """A waiting request finds what a new request with the same prompt finds."""
        for req in self.waiting:
            custom = req.sampling_params.custom_params
            twin = self._request(req.origin_input_ids, req.cache_salt, **custom)
            found = []
            for each in (req, twin):
                each.init_next_round_input(self.world.tree)
                nodes = getattr(each.last_node, "nodes", None)
                found.append((each.prefix_len, each.last_node, nodes))
            assert found[0] == found[1]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        req, shown = data.draw(st.sampled_from(self.running))
        if self.world.can_decode([req]):
            content = next(self._contents)
            self.world.write(self.world.decode([req]), [content])
            shown.append(content)
            req.output_ids.append(7)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "abort", "retract"]))
    def end(self, data: st.DataObject, how: str) -> None:
        entry = data.draw(st.sampled_from(self.running))
        self.running.remove(entry)
        req = entry[0]
        self.world.end(req, how)
        if how == "retract":
            shown = self._prefill(req)
            if shown is not None:
                req.output_ids.append(7)
                self.running.append((req, shown))

    @rule(count=st.integers(1, 60))
    def evict(self, count: int) -> None:
        self.world.tree.evict(EvictParams(num_tokens=count))

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.world.assert_empty()

    @invariant()
    def rows_show_what_was_written(self) -> None:
        contents = self.world.contents()
        free = self.world.free_pages()
        for req, shown in self.running:
            row = self.world.row(req)
            assert contents[row].tolist() == shown
            assert not np.isin(row, free).any()

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        world = self.world
        tree = self.world.tree
        private = sum(
            req.kv.kv_allocated_len - req.kv.cache_protected_len for req, _ in self.running
        )
        held = world.allocator.available_size() + tree.evictable_size() + tree.protected_size()
        assert held + private == world.total
        if not self.running:
            assert tree.protected_size() == 0

    def teardown(self) -> None:
        for req, _ in self.running:
            self.world.abort(req)
        self.world.assert_empty()


class ComposingInRust(Composing):
    core = "rust"


@pytest.mark.usefixtures("published_config")
class TestComposing(Composing.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.usefixtures("published_config")
class TestComposingInRust(ComposingInRust.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.fixture(params=["python", "rust"])
def world(request: pytest.FixtureRequest, published_config: None) -> World:
    """A world whose prefix tree holds ``DOCUMENTS``."""
    made = World(Setup(page=1, block=4, slots=110, core=request.param))
    made.controller.report.documents_off = None
    for document in DOCUMENTS:
        _publish(made, [*PROMPT, *document])
    return made


def _publish(world: World, prompt: Sequence[int]) -> None:
    """A request with ``prompt`` runs and finishes."""
    req = world.request("published", prompt)
    world.prefill(req)
    req.output_ids.append(7)
    world.finish(req)


def _waiting(world: World) -> Req:
    req = world.request("waiting", [*PROMPT, *itertools.chain(*DOCUMENTS), *QUERY])
    req.sampling_params.custom_params = {KEY: _spans(DOCUMENTS)}
    return req


def test_a_look_up_matches_few_documents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look-up of a waiting request matches the prompt and all documents, later ones the prompt and
    one document, and those that were not found or are gone."""
    matched = list[Any]()
    match = world.tree.tree_core.match_prefix

    def counted(params: Any) -> Any:
        matched.append(params)
        return match(params)

    monkeypatch.setattr(world.tree.tree_core, "match_prefix", counted)
    req = _waiting(world)
    whole = len(req.origin_input_ids) - len(QUERY)

    def look_up() -> tuple[int, int]:
        matched.clear()
        req.init_next_round_input(world.tree)
        return len(matched), req.prefix_len

    assert look_up() == (1 + len(DOCUMENTS), whole)
    for _ in range(2 * len(DOCUMENTS)):
        assert look_up() == (2, whole)
    _publish(world, [*PROMPT, 99])
    assert look_up() == (2, whole)
    world.tree.evict(EvictParams(num_tokens=world.total))
    assert look_up()[1] == 0
    _publish(world, [*PROMPT, *DOCUMENTS[0]])
    assert look_up() == (3, len(PROMPT) + len(DOCUMENTS[0]))
    for document in DOCUMENTS[1:]:
        _publish(world, [*PROMPT, *document])
    assert look_up()[1] == whole
    assert look_up() == (2, whole)


def test_documents_of_a_waiting_request_are_not_evicted_first(world: World) -> None:
    """Look-ups make documents recently used, each in its turn, as they do with a waiting request's prefix."""
    req = _waiting(world)
    req.init_next_round_input(world.tree)
    other = [200, *range(20)]
    _publish(world, other)
    for _ in DOCUMENTS:
        req.init_next_round_input(world.tree)
    found = req.prefix_len
    world.tree.evict(EvictParams(num_tokens=len(other)))
    req.init_next_round_input(world.tree)
    assert req.prefix_len == found == len(req.origin_input_ids) - len(QUERY)


def test_scores_are_kept_under_short_keys() -> None:
    """The key of a prompt's scores depends on ``extra_key`` and ``cache_salt``, but does not hold them."""
    prefix: Any = SimpleNamespace(documents=Documents(1, (2, 3)))
    names = [(None, None), ("a", None), (None, "a"), ("a" * 100_000, "b"), ("a", "b" * 100_000)]
    keys = set()
    for extra_key, cache_salt in names:
        req: Any = SimpleNamespace(
            origin_input_ids=[1, 2, 3, 4], extra_key=extra_key, cache_salt=cache_salt, lora_id=None
        )
        keys.add(_key(req, prefix, CachedDocuments(prefix.documents)))
    assert len(keys) == len(names)
    assert max(len(repr(key)) for key in keys) < 1000
