# SPDX-License-Identifier: Apache-2.0
"""Random operations on *composed* prompts (their documents' KV is cached). No slot in a row may be freed, no
slot may be lost, and no row may read KV of another salt. A *content* is a number that stands for KV."""

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

from sglang_reasoncache.cache.composition import Composition
from sglang_reasoncache.custom_params import KEY, OPT_OUT_KEY, REPAIR_KEY
from tests.property.world import MAX_ROWS, PROMPT, Setup, World

#: Tokens of documents that follow the *base* ``PROMPT``. First tokens differ, but two contain tokens 21 to 25.
DOCUMENTS = [list(range(20, 29)), [40, *range(21, 26)], list(range(60, 72)), [80, 81]]
QUERY = [90, 91, 92, 93]
SALTS = (None, "other")


class Composing(RuleBasedStateMachine):
    """Composes prompts at random. ``running``: requests, each with the contents that its row must show."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Setup(page=1, block=4, slots=110))
        self.world.controller.report.documents_off = None
        self.running: list[tuple[Req, list[int]]] = []
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

    @rule(
        order=st.permutations(range(4)).map(lambda order: order[:3]),
        salt=st.sampled_from(SALTS),
        repair=st.sampled_from(["none", "first:2", "query:.3"]),
        opts_out=st.booleans(),
        scores=st.booleans(),
    )
    def ask(
        self, order: list[int], salt: str | None, repair: str, opts_out: bool, scores: bool
    ) -> None:
        world, ends = self.world, [len(PROMPT)]
        prompt = list(PROMPT)
        for number in order:
            req = self._request([*PROMPT, *DOCUMENTS[number]], salt)
            shown = self._prefill(req)
            if shown is not None:
                world.finish(req)
                self.documents[salt, number] = shown
            prompt += DOCUMENTS[number]
            ends.append(len(prompt))
        spans = [list(span) for span in itertools.pairwise(ends)]
        custom = {KEY: spans, REPAIR_KEY: repair, **({OPT_OUT_KEY: False} if opts_out else {})}
        if repair.startswith("query") and scores:
            scoring = self._request([*prompt, *QUERY], salt, **custom)
            scoring.sampling_params.max_new_tokens = 0
            if self._prefill(scoring) is not None:
                world.finish(scoring)
        req = self._request([*prompt, *QUERY], salt, **custom)
        missed = world.tree.controller.stats.repairs_missed
        shown = self._prefill(req)
        if shown is None:
            return
        prefix, missed = req.last_node, world.tree.controller.stats.repairs_missed - missed
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
        contents, free = self.world.contents(), self.world.free_pages()
        for req, shown in self.running:
            row = self.world.row(req)
            assert contents[row].tolist() == shown
            assert not np.isin(row, free).any()

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        world, tree = self.world, self.world.tree
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


@pytest.mark.usefixtures("published_config")
class TestComposing(Composing.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
