# SPDX-License-Identifier: Apache-2.0
"""Tests that what a finished response shared stays in the prefix cache, for prompts that may read it."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_reasoncache.cache import continuation, continuations
from sglang_reasoncache.cache.continuation import Branches, Continuation, Continued, Path
from sglang_reasoncache.cache.continuations import MOST_ALIKE
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.swap import Restored, Swapped, swapped_of
from sglang_reasoncache.cache.tree.base import first_shared
from sglang_reasoncache.compat.carriers import CONTINUED
from tests.property.world import OUTPUT, PROMPT, Pair, Setup, World
from tests.unit.test_swap import admitted, overwrite, what_is_read

pytestmark = pytest.mark.usefixtures("published_config")

SETUPS = [
    Setup(page=page, block=4, slots=160, core=core, continues=True)
    for page in (1, 4)
    for core in ("python", "rust")
]
SETUPS += [replace(setup, pairs=True) for setup in SETUPS]
#: The first position that shares.
FIRST = 8
PAIRS = Pair(FIRST, 24), Pair(12, 20)


def shared(
    world: World, name: str = "r", first: int = PROMPT[0], written: int = OUTPUT
) -> tuple[Req, list[int]]:
    """A request that shared, and its tokens. ``first``: the first token of its prompt."""
    req = world.request(name, [first, *PROMPT[1:]])
    world.respond(req, range(100, 101 + written))
    world.controller.after_decode([req])
    saved = world.controller.pipeline.saved
    world.propose(req, *PAIRS)
    for _ in range(3):
        world.controller.after_decode([req])
    assert world.controller.pipeline.saved == saved + 8
    return req, [*req.origin_input_ids, *req.output_ids]


def finished(world: World, name: str = "r", first: int = PROMPT[0]) -> list[int]:
    """The tokens of a request that shared, and finished."""
    req, tokens = shared(world, name, first)
    world.finish(req)
    return tokens


def without_output(world: World, count: int) -> None:
    """Leave ``count`` exact prompts of 10 tokens in the cache."""
    for number in range(count):
        req = world.request(f"plain {number}", range(1000 * number + 7, 1000 * number + 17))
        world.prefill(req)
        req.output_ids.append(1)
        world.finish(req)


def kept(setup: Setup, tokens: list[int]) -> int:
    """How many of the tokens of a response that finished stay cached: all whole pages but the newest token, and
    where keys are pairs without the token before it."""
    return (len(tokens) - 1 - setup.pairs) // setup.page * setup.page


def asked(
    world: World,
    tokens: list[int],
    opted_out: bool = False,
    salt: str | None = None,
    **attributes: Any,
) -> Req:
    """A prompt that goes on with ``tokens``, looked up in the cache. ``attributes``: of SGLang's request."""
    req = world.request("next", [*tokens, 900, 901], opted_out, salt)
    for name, value in attributes.items():
        setattr(req, name, value)
    req.init_next_round_input(world.tree)
    return req


def run(world: World, req: Req) -> None:
    world.prefill(req)
    req.output_ids.append(7)
    for _ in range(24):
        world.step(req)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_prompt_that_goes_on_reads_all_of_it(setup: Setup) -> None:
    world = World(setup)
    tokens = finished(world)
    there = world.allocator.continuations
    written = kept(setup, tokens)
    assert len(there) == 1 and there.aliased == 8
    assert world.controller.pipeline.saved == 0, "running requests save nothing"
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    req = asked(world, tokens)
    assert req.prefix_len == written and isinstance(req.last_node, Continued)
    run(world, req)
    assert world.tree.reads_shifted([req])
    totals = world.controller.stats
    assert (totals.prompts_continued, totals.tokens_continued) == (1, written - FIRST)
    # The next turn goes on with what this one computed.
    longer = [*req.origin_input_ids, *req.output_ids]
    world.finish(req)
    assert len(there) == 1, "one that nobody else reads is extended"
    again = asked(world, longer)
    assert again.prefix_len == kept(setup, longer)
    world.assert_empty()
    assert len(world.allocator.continuations) == 0


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"opted_out": True}, FIRST),
        ({"salt": "salt"}, 0),
        ({"return_logprob": True, "logprob_start_len": 20}, FIRST),
        ({"return_hidden_states": True}, FIRST),
        ({"sampling_params": SamplingParams(max_new_tokens=0)}, FIRST),
        (
            {
                "sampling_params": SamplingParams(max_new_tokens=0, n=2),
                "return_logprob": True,
                "logprob_start_len": 1000,  # behind the prompt, as SGLang sets it
            },
            FIRST,
        ),
    ],
    ids=["opted-out", "salt", "log-probabilities", "hidden-states", "scores", "several-scores"],
)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_others_read_what_is_exact(setup: Setup, options: dict[str, Any], most: int) -> None:
    world = World(setup)
    tokens = finished(world)
    # With speculation SGLang takes no request for one that only scores.
    with get_spec().override(speculative_algorithm="NGRAM"):
        req = asked(world, tokens, **options)
    assert req.prefix_len == most
    assert not world.tree.reads_shifted([req])
    world.assert_empty()


@pytest.mark.parametrize(("exact_tokens", "reads_exact"), [(-3, True), (FIRST + 4, False)])
def test_exact_kv_is_read_where_it_is_nearly_as_long(exact_tokens: int, reads_exact: bool) -> None:
    """A request that opted out has computed the same tokens, or some of them."""
    world = World(SETUPS[0])
    tokens = finished(world)
    other = asked(world, tokens[:exact_tokens], opted_out=True)
    run(world, other)
    world.finish(other)
    req = asked(world, tokens)
    assert isinstance(req.last_node, Continued) != reads_exact
    assert req.prefix_len == len(tokens) - (3 if reads_exact else 1)
    assert world.tree.reads_shifted([req]) != reads_exact
    world.assert_empty()


def test_a_prompt_whose_prefill_would_take_long_reads_what_is_exact() -> None:
    """On a GPU, latent rows and sinks make prefills over shifted keys slow."""
    world = World(SETUPS[0])
    tokens = finished(world)
    length = len(tokens) - 1
    for most, continues in ((2 * length, True), (2 * length - 1, False)):
        world.tree.most_pairs = most
        req = asked(world, tokens)
        assert req.prefix_len == (length if continues else FIRST)
        world.tree.unlock(req.lock)


def test_beside_a_host_tier_a_long_conversation_is_computed_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only exact KV goes to the host. What is behind it is lost when SGLang evicts it."""
    world = World(SETUPS[0])
    tokens = finished(world)
    length = len(tokens) - 1
    for tier, most, continues in ((None, 0, True), (object(), 23, True), (object(), 22, False)):
        monkeypatch.setattr(world.tree, "cache_controller", tier)
        monkeypatch.setattr("sglang_reasoncache.cache.tree.shared.MOST_BESIDE_TIER", most)
        req = asked(world, tokens)
        assert req.prefix_len == (length if continues else FIRST)
        monkeypatch.undo()


def test_what_nobody_uses_behind_a_path_in_use_ages() -> None:
    """A client went on with a response in two ways, and goes on with one of them, so the path of both stays in
    use. The other way goes before a conversation that was used later."""
    world = World(replace(SETUPS[0], slots=400))
    tokens = finished(world)
    reqs = [asked(world, [*tokens, *range(first, first + 40)]) for first in (500, 600)]
    for req in reqs:
        run(world, req)
    ways = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
    for req in reqs:
        world.finish(req)
    without_output(world, 10)
    other = finished(world, "other", first=50)
    there = world.allocator.continuations
    assert len(there) == 4
    in_use = asked(world, ways[1])
    in_use.lock = world.tree.lock(in_use.last_node)
    evicted = 0
    while evicted < 120:
        evicted += world.tree.evict(EvictParams(num_tokens=2)).num_tokens_evicted
    lengths = [asked(world, each).prefix_len for each in (*ways, other)]
    assert lengths[0] < len(ways[0]) - 20 and lengths[1] == len(ways[1]) - 1
    assert lengths[2] == len(other) - 1
    world.tree.unlock(in_use.lock)
    world.assert_empty()


def test_continuations_give_at_most_twice_their_share() -> None:
    """Though an eighth of one goes at once, and SGLang evicts a few slots in each decode step."""
    world = World(replace(SETUPS[0], slots=600))
    without_output(world, 20)
    finished(world)
    there = world.allocator.continuations
    share = there.evictable / world.tree.evictable_size()
    before = there.evictable
    evicted = 0
    while evicted < 100:
        evicted += world.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted
    assert 0 < before - there.evictable < 2 * share * evicted
    world.assert_empty()


def test_what_continuations_pay_is_not_taken_from_the_tree_as_well() -> None:
    """And a flush leaves no debt."""
    world = World(replace(SETUPS[0], slots=600))
    without_output(world, 20)
    finished(world)
    there = world.allocator.continuations
    while world.tree._owed < there.least_evicted():
        assert world.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted > 0
    of_core = world.tree.evictable_size() - there.evictable
    before = there.evictable
    assert (
        world.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted
        == before - there.evictable
        > 0
    )
    assert world.tree.evictable_size() - there.evictable == of_core
    world.tree._owed = 3.0
    world.assert_empty()
    assert world.tree._owed == 0.0


def test_a_prompt_of_which_several_samples_follow_reads_it() -> None:
    """SGLang first computes the prompt without output, for its samples: not for scores."""
    world = World(SETUPS[0])
    tokens = finished(world)
    req = world.request("next", [*tokens, 900, 901])
    req.sampling_params.max_new_tokens = 0
    req.sampling_params.n = 4
    req.init_next_round_input(world.tree)
    assert isinstance(req.last_node, Continued) and req.prefix_len > FIRST


def test_what_is_computed_again_is_reported_as_exact() -> None:
    """A retracted request loses its prefix, and computes it from the first position on."""
    world = World(SETUPS[0])
    req = asked(world, finished(world))
    run(world, req)
    assert getattr(req, CONTINUED) is not None
    world.retract(req)
    world.tree.evict(EvictParams(num_tokens=world.total))
    assert getattr(req, CONTINUED) is None


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_eviction_gives_what_is_promised(setup: Setup) -> None:
    """The least recently used loses its last tokens first. What a request reads is not evicted."""
    world = World(setup)
    tokens = finished(world)
    there = world.allocator.continuations
    allocator = world.allocator
    # The request that locks the path of the first response keeps the core from evicting it.
    reader = asked(world, tokens, opted_out=True)
    reader.lock = world.tree.lock(reader.last_node)
    before = allocator.available_size()
    evictable = world.tree.evictable_size()
    world.tree.evict(EvictParams(num_tokens=4))
    freed = allocator.available_size() - before
    assert freed == evictable - world.tree.evictable_size() and 4 <= freed < 8
    req = asked(world, tokens)
    world.tree.unlock(reader.lock)
    held = req.prefix_len
    assert FIRST < held < len(tokens) - 1
    world.prefill(req)
    req.output_ids.append(7)
    world.tree.evict(EvictParams(num_tokens=10**6))
    assert len(there) == 1 and world.tree.evictable_size() == 0
    assert world.written_at[world.row(req)][FIRST] == 24
    world.abort(req)
    world.tree.evict(EvictParams(num_tokens=10**6))
    assert len(there) == there.aliased == there.evictable == there.protected == 0
    assert allocator.available_size() == world.total and not allocator.references


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_lost_its_path_is_evicted(setup: Setup) -> None:
    world = World(setup)
    finished(world)
    # The last node of the path goes first, and all that goes on with it.
    world.tree.evict(EvictParams(num_tokens=1))
    assert len(world.allocator.continuations) == 0
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


class Counting(OrderedDict[Any, None]):
    """Counts how many keys were looked at one after the other."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.looked_at += 1
            yield key


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_eviction_looks_at_what_it_evicts(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang evicts at each decode step once the pool is full, however many continuations there are."""
    world = World(replace(setup, slots=800))
    tree = world.tree
    there = world.allocator.continuations
    prompts = [finished(world, str(number), 500 + number) for number in range(12)]
    paths = [node.path.node for node in there if node.path is not None]
    checked = list[int]()
    is_cached = tree._is_cached

    def check(node: int) -> bool:
        checked.append(node)
        return bool(is_cached(node))

    monkeypatch.setattr(tree, "_is_cached", check)
    tree.evict(EvictParams(num_tokens=1))
    assert checked == paths[:1] and len(there) == 11
    # The core cannot evict. Of the continuations those that were used least recently are looked at.
    locks = [tree.lock(asked(world, tokens, opted_out=True).last_node) for tokens in prompts]
    monkeypatch.setattr(continuations, "_VICTIMS", 2)
    there._used = counting = Counting(there._used)
    counting.looked_at = 0
    tree.evict(EvictParams(num_tokens=1))
    assert checked == paths[:1] and len(there) == 11 and counting.looked_at == 2
    for lock in locks:
        tree.unlock(lock)
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_same_response_is_kept_once(setup: Setup) -> None:
    world = World(setup)
    assert finished(world, "a") == finished(world, "b")
    assert len(world.allocator.continuations) == 1
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_one_that_contains_another_takes_its_place(setup: Setup) -> None:
    """Two samples of a prompt are equal, and one ends earlier. The path is in use as long as the conversation
    goes on."""
    world = World(setup)
    longer, tokens = shared(world, "longer", written=OUTPUT + 9)
    finished(world, "shorter")
    there = world.allocator.continuations
    [one] = there
    world.finish(longer)
    [other] = there
    assert one is not other and other.end == kept(setup, tokens) > one.end + setup.page
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    assert asked(world, tokens).prefix_len == other.end
    world.assert_empty()


def path_of(node: Continuation) -> int:
    """SGLang's id of the node of the tree that a continuation goes on with."""
    assert node.path is not None
    return int(node.path.node)


def restorable(world: World, tokens: list[int]) -> tuple[Req, Swapped, np.ndarray]:
    """A request that read a continuation, decoded, and was retracted; its copy on the host; what it read."""
    req = asked(world, tokens)
    assert isinstance(req.last_node, Continued)
    run(world, req)
    contents, _ = what_is_read(world, req)
    world.retract(req)
    swapped = swapped_of(req)
    assert swapped is not None
    return req, swapped, contents


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_comes_back_goes_on_with_the_continuation_that_it_read(setup: Setup) -> None:
    """Of all its KV only what the continuation does not hold takes slots of its own."""
    world = World(replace(setup, swap=1 << 20))
    tokens = finished(world)
    there = world.allocator.continuations
    [one] = there
    end = one.end
    for _ in range(2):
        req, swapped, contents = restorable(world, tokens)
        length = swapped.length
        before = world.allocator.available_size() + world.tree.evictable_size()
        assert admitted(world, req) <= setup.page + setup.pairs
        assert isinstance(req.last_node, Continued) and req.kv.cache_protected_len == end
        in_use = before - world.allocator.available_size() - world.tree.evictable_size()
        pages = -(-req.kv.kv_allocated_len // setup.page) * setup.page
        # The eight slots that positions of the continuation share are counted once.
        assert in_use == pages - 8
        assert (world.row(req)[FIRST:end] == one.slots[: end - FIRST].numpy()).all()
        assert (what_is_read(world, req)[0][:length] == contents[:length]).all()
        assert world.tree.reads_shifted([req])
        assert (
            world.tree._first_approximate(req, world.allocator.row_of(req.kv.req_pool_idx)) == FIRST
        )
        # It may be retracted again.
        world.step(req)
        contents, _ = what_is_read(world, req)
        world.retract(req)
        assert admitted(world, req) <= setup.page + setup.pairs
        length -= setup.page
        assert (what_is_read(world, req)[0][:length] == contents[:length]).all()
        world.abort(req)
        assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    req, _, _ = restorable(world, tokens)
    admitted(world, req)
    world.step(req)
    longer = [*req.origin_input_ids, *req.output_ids]
    world.finish(req)
    [one] = there
    # The step wrote the token that the prefill should have sampled.
    assert kept(setup, [*longer, 0]) == one.end
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_grew_again_with_other_tokens_is_not_read(setup: Setup) -> None:
    """The continuation lost its end, and another conversation has extended it since."""
    world = World(replace(setup, swap=1 << 20))
    tokens = finished(world)
    req, swapped, contents = restorable(world, tokens)
    [one] = world.allocator.continuations
    whole = one.end
    lock = world.tree.lock(path_of(one))
    world.tree.evict(EvictParams(num_tokens=setup.page))
    assert one.end < whole
    other = world.request("other", [*tokens[: one.end + setup.pairs], *range(700, 740)])
    other.init_next_round_input(world.tree)
    assert isinstance(other.last_node, Continued)
    world.prefill(other)
    other.output_ids.append(7)
    world.finish(other)
    assert list(world.allocator.continuations) == [one] and one.end > whole
    world.tree.unlock(lock)
    assert admitted(world, req) <= setup.page + setup.pairs
    assert not isinstance(req.last_node, Continued)
    again, _ = what_is_read(world, req)
    assert (again[: swapped.length] == contents[: swapped.length]).all()
    world.step(req)
    world.finish(req)
    world.assert_empty()


@pytest.mark.parametrize(("exact_until", "opts_out"), [(None, False), (20, False), (FIRST, True)])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_is_less_exact_than_before_is_not_read(
    setup: Setup, exact_until: int | None, opts_out: bool
) -> None:
    """A continuation may have lost its end, and have been extended by a response with the same tokens that
    shared. Its keys are rotated, and the request's copy says that fewer are, or none."""
    world = World(replace(setup, swap=1 << 20))
    tokens = finished(world)
    req, swapped, contents = restorable(world, tokens)
    assert swapped.first_shared == FIRST
    swapped.first_shared = exact_until
    if opts_out:
        req.return_hidden_states = True
    admitted(world, req)
    assert not isinstance(req.last_node, Continued)
    assert (what_is_read(world, req)[0][: swapped.length] == contents[: swapped.length]).all()
    world.abort(req)
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_shifted_keys_are_known_before_the_first_prefill_is_published(setup: Setup) -> None:
    world = World(replace(setup, swap=1 << 20))
    tokens = finished(world)
    req, _, _ = restorable(world, tokens)
    req.init_next_round_input(world.tree)
    _, node = world.tree.init_load_back(
        InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
    )
    assert isinstance(node, Restored) and isinstance(node.node, Continued)
    req.last_node = node._replace(first_shared=None)
    assert first_shared(req, HostRow()) == FIRST
    req.last_node = node.node
    world.allocator.free(node.slots)
    world.assert_empty()


def test_look_ups_between_changes_find_all() -> None:
    """What begins where is kept from one look-up to the next."""
    page = 4
    branches = Branches(page)
    tokens = np.arange(100, 200)
    nodes: list[Continuation] = []
    for start in (8, 24, 24, 40, 16):
        digest = bytes([len(nodes)])
        empty = np.zeros(0, dtype=np.int64)
        node = Continuation(
            Path((None, None), digest, 1), start, tokens[start : start + 20].copy(),
            torch.arange(1, 21), np.zeros(20, dtype=np.int64), 20, empty, empty, page,
        )  # fmt: skip
        nodes.append(node)

    def expected(there: list[Continuation], most: int) -> list[tuple[int, list[bytes]]]:
        starts = sorted({each.start for each in there if each.start <= most})
        return [
            (start, sorted(each.digest for each in there if each.start == start))
            for start in starts
        ]

    def looked_up(most: int, prompt: np.ndarray = tokens) -> list[tuple[int, list[bytes]]]:
        return [(start, sorted(by_digest)) for start, by_digest in branches.beginning(prompt, most)]

    there: list[Continuation] = []
    for node in nodes:
        branches.add(node)
        there.append(node)
        for most in (7, 8, 24, 39, 100):
            assert looked_up(most) == expected(there, most)
    # Other tokens at a place, or too few.
    assert looked_up(100, np.concatenate((tokens[:16], tokens[:84]))) == expected(nodes[:1], 100)
    assert looked_up(100, tokens[:42]) == expected([n for n in nodes if n.start < 40], 100)
    for node in nodes[::-1]:
        branches.remove(node)
        there.remove(node)
        assert looked_up(100) == expected(there, 100)


@pytest.mark.parametrize("gone", ["all", "end"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_comes_back_after_its_continuation_went_has_slots_of_its_own(
    setup: Setup, gone: str
) -> None:
    world = World(replace(setup, swap=1 << 20))
    tokens = finished(world)
    req, swapped, contents = restorable(world, tokens)
    length = swapped.length
    [one] = world.allocator.continuations
    world.tree.evict(EvictParams(num_tokens=one.counted.owned if gone == "all" else setup.page))
    if gone == "all":
        overwrite(world)
    assert admitted(world, req) <= setup.page + setup.pairs
    assert not isinstance(req.last_node, Continued)
    assert (what_is_read(world, req)[0][:length] == contents[:length]).all()
    world.step(req)
    world.finish(req)
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_a_prompt_leaves_unread_makes_room_for_it(setup: Setup) -> None:
    """A prompt repeats the first part of a long response, such as an edited history, and locks only that part:
    prompt and response together may be larger than the pool, and nothing else runs that would ever give slots
    back."""
    world = World(setup)
    req, tokens = shared(world, written=100)
    world.finish(req)
    [one] = world.allocator.continuations
    req = world.request("next", [*tokens[:40], *range(500, 590)])
    req.sampling_params.max_new_tokens = 8
    assert len(tokens) - 40 + len(req.origin_input_ids) > world.total
    computed = admitted(world, req)
    kept = 40 // setup.page * setup.page
    assert computed == len(req.origin_input_ids) - kept
    assert one.pinned + one.start == kept and one.end < len(tokens) - setup.page
    assert world.allocator.continuations.protected <= one.pinned
    world.finish(req)
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_exact_kv_beside_a_continuation_makes_room_for_it(setup: Setup) -> None:
    """The tree has more of a prompt than the path of the continuation that it reads, from a request that opted
    out. Both together with the prompt may be larger than the pool."""
    world = World(setup)
    req, tokens = shared(world, written=100)
    world.finish(req)
    exact = world.request("exact", tokens[:48], opted_out=True)
    world.prefill(exact)
    exact.output_ids.append(1)
    world.finish(exact)
    req = world.request("next", [*tokens, *range(500, 530)])
    req.sampling_params.max_new_tokens = 2
    assert admitted(world, req) == len(req.origin_input_ids) - kept(setup, tokens)
    assert isinstance(req.last_node, Continued)
    assert world.tree.tree_core.protected_size() == FIRST
    world.finish(req)
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_several_read_parts_of_different_lengths(setup: Setup) -> None:
    """What the longest part has stays; then what the next has."""
    world = World(setup)
    req, tokens = shared(world, written=80)
    world.finish(req)
    there = world.allocator.continuations
    [one] = there
    whole = there.evictable
    locks = []
    lengths = []
    for count in (32, 60, 48):
        req = world.request(f"next {count}", [*tokens[:count], 900, 901])
        req.init_next_round_input(world.tree)
        locks.append(world.tree.lock(req.last_node))
        lengths.append(req.prefix_len)
    for left in (lengths, [lengths[0], lengths[2]], lengths[:1]):
        assert one.start + one.pinned == max(left)
        assert there.evictable + there.protected == whole and there.evictable > 0
        while there.evictable:
            # At least an eighth goes at once, but nothing that is read.
            world.tree.evict(EvictParams(num_tokens=1))
        assert one.end == max(left) and there.evictable == 0
        whole = there.protected
        world.tree.unlock(locks[lengths.index(max(left))])
    assert one.pins == one.pinned == there.protected == 0
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_chunks_behind_a_continuation_stay_if_the_client_leaves(setup: Setup) -> None:
    """Else a client that tries again, and waits less than its prompt takes, would never get an answer."""
    world = World(setup)
    tokens = finished(world)
    prompt = [*tokens, *range(500, 560)]
    req = asked(world, prompt)
    assert isinstance(req.last_node, Continued)
    length = req.prefix_len
    for end in (length + 16, length + 32):
        req.extend_end = end
        req.lock = req.lock or world.tree.lock(req.last_node)
        world.write(world.extend(req), [1] * 16)
        checkpoint_kv_cache(req, world.tree)
    assert req.prefix_len == length + 32
    world.abort(req)
    again = asked(world, prompt)
    assert again.prefix_len == kept(setup, prompt[: length + 33])
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks waiting requests up in each pass of its scheduler. Another prompt is hashed again."""
    world = World(SETUPS[0])
    tokens = finished(world)
    hashed = list[int]()
    add = continuations._add_digests

    def counting(digests: dict[int, bytes], *rest: Any) -> None:
        had = len(digests)
        add(digests, *rest)
        hashed.append(len(digests) - had)

    monkeypatch.setattr(continuations, "_add_digests", counting)
    req = asked(world, tokens)
    length = req.prefix_len
    for _ in range(3):
        req.init_next_round_input(world.tree)
    assert req.prefix_len == length and hashed == [1, 0, 0, 0]
    req.origin_input_ids = array("q", req.origin_input_ids)
    req.init_next_round_input(world.tree)
    assert hashed[4:] == [1]
    world.assert_empty()


@pytest.mark.parametrize("site", ["add", "match"])
def test_a_failure_is_contained(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is disabled, no slot is lost, and the prompt is computed."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a failure of the plugin")

    world = World(SETUPS[0])
    monkeypatch.setattr(type(world.allocator.continuations), site, fail)
    tokens = finished(world)
    req = asked(world, tokens)
    assert req.prefix_len == FIRST
    assert world.controller.report.disabled == "RuntimeError: a failure of the plugin"
    run(world, req)
    world.finish(req)
    world.assert_empty()


def test_a_turn_that_cannot_be_kept_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no memory is left when a turn is appended to the one before, that one can be read as before."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    world = World(SETUPS[0])
    tokens = finished(world)
    req = asked(world, tokens)
    length = req.prefix_len
    run(world, req)
    [node] = world.allocator.continuations._used
    with monkeypatch.context() as patch:
        patch.setattr(continuation, "torch", SimpleNamespace(cat=fail))
        world.finish(req)
    assert "no memory is left" in (world.controller.report.disabled or "")
    assert len(node.tokens) == len(node.slots) == len(node.known)
    assert asked(world, tokens).prefix_len == length
    world.assert_empty()


def test_what_a_hostile_client_can_keep_is_bounded() -> None:
    """Neither many short turns nor many turns that begin alike make look-ups slow."""
    world = World(SETUPS[0])
    tokens = finished(world)
    there = world.allocator.continuations
    for number in range(30):
        req = asked(world, [*tokens, number])
        world.prefill(req)
        req.output_ids.append(7)
        world.finish(req)
    assert len(there) == 1, "too short to keep"
    world.assert_empty()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_what_others_wrote_in_between_costs_no_look_up(page: int) -> None:
    """A client went on behind each page of a response with other tokens, in the middle of the page. A prompt
    that goes on with the response compares itself with none of that."""
    tokens = np.arange(40 * page)
    branches = Branches(page)
    for start in range(0, len(tokens), page):
        for other in range(MOST_ALIKE):
            mine = np.append(tokens[start : start + page - 1], [-1 - other] * 16)
            slots = torch.arange(len(mine))
            nothing = np.zeros(0, dtype=np.int64)
            before = Path((None, None), b"", 0)
            branches.add(
                Continuation(before, start, mine, slots, nothing, 0, nothing, nothing, page)
            )
    assert not list(branches.beginning(tokens, len(tokens)))
    mine = np.append(tokens[: 3 * page - 1], [-3, *[-99] * 15])
    [(start, by_digest)] = branches.beginning(mine, len(mine))
    assert start == 2 * page and len(by_digest[b""]) == 1


def quoting(world: World) -> list[int]:
    """The tokens of a request that read a block of its prompt, which the tree owns, and finished."""
    req = world.start()
    world.propose(req, Pair(12, 0))
    for _ in range(3):
        world.controller.after_decode([req])
    assert world.controller.pipeline.saved == 4
    assert (world.row(req)[12:16] == world.row(req)[:4]).all()
    world.finish(req)
    return [*req.origin_input_ids, *req.output_ids]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_read_its_prompt_stays_cached(setup: Setup) -> None:
    """The next turn reads it, opted out only what is before. Its own response may read the prompt again, and
    what that borrows of the turn before is held once, too."""
    world = World(setup)
    tokens = quoting(world)
    there = world.allocator.continuations
    allocator = world.allocator
    assert (len(there), there.aliased, there.borrowed) == (1, 4, 4 // setup.page)
    assert asked(world, tokens, opted_out=True).prefix_len == 12
    req = asked(world, tokens)
    assert req.prefix_len == kept(setup, tokens)
    run(world, req)
    world.controller.after_decode([req])
    # A block that reads what the first turn borrowed, and one that reads the first turn's own slots.
    late = len(req.origin_input_ids) + -len(req.origin_input_ids) % 4
    world.propose(req, Pair(late, 12), Pair(late + 8, 20))
    for _ in range(3):
        world.controller.after_decode([req])
    assert (world.row(req)[late : late + 4] == world.row(req)[:4]).all()
    world.finish(req)
    assert there.aliased == 12 and world.controller.pipeline.saved == 0
    assert allocator.available_size() + world.tree.evictable_size() == world.total
    held = world.total - allocator.available_size()
    for wanted in (1, 5, 9, 1000):
        before = allocator.available_size()
        evictable = world.tree.evictable_size()
        world.tree.evict(EvictParams(num_tokens=wanted))
        freed = allocator.available_size() - before
        assert freed >= min(wanted, evictable) and freed == evictable - world.tree.evictable_size()
    assert allocator.available_size() == world.total > held
    assert not allocator.references and there.borrowed == len(there) == 0


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_borrowed_of_a_path_goes_before_it(setup: Setup) -> None:
    """A request that locks the path keeps its slots, whether or not what borrows them is evicted."""
    world = World(setup)
    tokens = quoting(world)
    reader = asked(world, tokens, opted_out=True)
    lock = world.tree.lock(reader.last_node)
    allocator = world.allocator
    before = allocator.available_size()
    evictable = world.tree.evictable_size()
    world.tree.evict(EvictParams(num_tokens=1000))
    assert allocator.available_size() - before == evictable
    assert len(allocator.continuations) == 0 and not allocator.references
    world.prefill(reader)
    world.tree.unlock(lock)
    assert (
        reader.kv.cache_protected_len
        and world.contents()[world.row(reader)[:4]].tolist() == [1] * 4
    )
    world.abort(reader)
    world.assert_empty()


@pytest.mark.parametrize("setup", SETUPS[:1], ids=str)
def test_what_was_evicted_stays_in_nobodys_memory(setup: Setup) -> None:
    """A session keeps its requests, and these what they read."""
    world = World(setup)
    finished(world)
    (node,) = world.allocator.continuations
    length = len(node)
    for kept in (length - 1, length // 2, 3, 0):
        node.keep(kept)
        held = [node.slots.untyped_storage().nbytes() / node.slots.element_size()]
        held += [
            len(each if each.base is None else each.base) for each in (node.tokens, node.known)
        ]
        assert max(held) <= max(2 * kept, length * (kept > length // 2))
