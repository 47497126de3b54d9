# SPDX-License-Identifier: Apache-2.0
"""Which requests have documents found in them (``documents=auto``), with SGLang's own ``TokenizerManager``. The
tests play the scheduler: they read what the manager sends, and answer."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_reasoncache.compat.carriers import CONFIG, FINDER
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin import documents
from tests.unit.test_waiting import Manager, _all_of, _turns, run  # noqa: F401

DRAW = random.Random(3)
BASE, ONE, TWO, THREE = (
    [DRAW.randrange(3, 90) for _ in range(length)] for length in (20, 70, 80, 90)
)
#: Start and end of ``TWO`` and ``ONE`` behind ``BASE``, as the plugin sends spans to schedulers.
BOUNDS = [20, 100, 100, 170]


@pytest.fixture
def auto(run: Callable[..., None]) -> Callable[..., None]:  # noqa: F811
    """Runs an asynchronous test with a manager of a server that finds documents."""

    def test_with_auto(test: Callable[[Manager], Awaitable[None]]) -> None:
        async def whole(manager: Manager) -> None:
            setattr(manager.server_args, CONFIG, ReasonCacheConfig(documents="auto"))
            try:
                await test(manager)
            finally:
                delattr(manager.server_args, CONFIG)

        run(whole)

    return test_with_auto


def _prompt(*texts: Sequence[int]) -> list[int]:
    return [*BASE, *itertools.chain(*texts), *(DRAW.randrange(3, 90) for _ in range(8))]


def _obj(prompt: Any, **options: Any) -> GenerateReqInput:
    sampling = {"max_new_tokens": 8, **options.pop("sampling", {})}
    return GenerateReqInput(**{"input_ids": prompt, "sampling_params": sampling, **options})


async def _sent(manager: Manager, obj: Any) -> list[Any]:
    """What the scheduler receives for ``obj``, which it answers."""
    manager.sent.clear()
    task = asyncio.ensure_future(_all_of(manager, obj))
    answered = set[str]()
    while not task.done():
        await _turns()
        for each in [each for each in manager.received() if each.rid not in answered]:
            answered.add(each.rid)
            await manager.finish(each.rid)
    await task
    return manager.received()


def _marks(sent: Sequence[Any]) -> Any:
    """The bounds of the documents that the last request marks."""
    custom = sent[-1].sampling_params.custom_params
    return custom and custom.get("documents")


async def _learn(manager: Manager) -> None:
    for texts in ((ONE, TWO), (THREE, ONE)):
        [only] = await _sent(manager, _obj(_prompt(*texts)))
        assert not only.sampling_params.custom_params


def test_known_text_is_marked(auto: Callable[..., None]) -> None:
    """Its documents are prefilled alone, as those that a client marks."""

    async def test(manager: Manager) -> None:
        await _learn(manager)
        prompt = _prompt(TWO, ONE)
        custom = {"documents_repair": "first:4"}
        obj = _obj(prompt, sampling={"custom_params": custom})
        given = obj.sampling_params
        first, second, last = await _sent(manager, obj)
        assert [list(each.input_ids) for each in (first, second)] == [[*BASE, *TWO], [*BASE, *ONE]]
        assert list(last.input_ids) == prompt
        assert last.sampling_params.custom_params == {"documents": BOUNDS, **custom}
        # The caller may use its parameters again.
        assert given == {"max_new_tokens": 8, "custom_params": custom}

    auto(test)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": {"custom_params": {"reasoncache": False}}},
        {"sampling": {"custom_params": {"documents_repair": "nonsense"}}},
        {"sampling": {"max_new_tokens": 0}},
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 150},
    ],
    ids=repr,
)
def test_exact_requests_find_nothing(auto: Callable[..., None], options: Any) -> None:
    async def test(manager: Manager) -> None:
        await _learn(manager)
        known = len(getattr(manager, FINDER))
        assert not _marks(await _sent(manager, _obj(_prompt(TWO, ONE), **options)))
        assert len(getattr(manager, FINDER)) == known

    auto(test)


@pytest.mark.parametrize("wrong", [2**70, -(2**64), 1.5], ids=repr)
def test_a_prompt_that_sglang_refuses_ends_nothing(auto: Callable[..., None], wrong: float) -> None:
    async def test(manager: Manager) -> None:
        await _learn(manager)
        with pytest.raises((OverflowError, TypeError, ValueError)):
            await _sent(manager, _obj([*_prompt(TWO, ONE), wrong]))
        assert _marks(await _sent(manager, _obj(_prompt(TWO, ONE)))) == BOUNDS

    auto(test)


def test_log_probabilities_of_the_output_are_no_figures_of_the_prompt(
    auto: Callable[..., None],
) -> None:
    async def test(manager: Manager) -> None:
        await _learn(manager)
        obj = _obj(_prompt(TWO, ONE), return_logprob=True, logprob_start_len=-1)
        assert _marks(await _sent(manager, obj)) == BOUNDS

    auto(test)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_tenants_are_apart(auto: Callable[..., None], name: str) -> None:
    async def test(manager: Manager) -> None:
        await _learn(manager)
        assert not _marks(await _sent(manager, _obj(_prompt(TWO, ONE), **{name: "theirs"})))
        assert _marks(await _sent(manager, _obj(_prompt(TWO, ONE)))) == BOUNDS

    auto(test)


def test_prompts_of_text(auto: Callable[..., None]) -> None:
    async def test(manager: Manager) -> None:
        system, *texts = (
            " ".join(DRAW.choice(["one", "two", "three", "four"]) for _ in range(80))
            for _ in range(4)
        )
        for order in ((0, 1), (2, 0), (1, 2), (2, 1)):
            text = "\n".join([system, *(texts[at] for at in order), "what?"])
            sent = await _sent(manager, _obj(None, text=text))
            alone = manager.tokenizer(text)["input_ids"]
            assert list(sent[-1].input_ids) == alone
        assert len(_marks(sent)) >= 4

    auto(test)


@pytest.mark.parametrize("opted_out", [True, False])
def test_what_the_operator_prefers_stays(auto: Callable[..., None], opted_out: bool) -> None:
    """A request's ``custom_params`` replace those that the operator prefers as a whole, and so would ours."""

    async def test(manager: Manager) -> None:
        await _learn(manager)
        mine = {"reasoncache": not opted_out, "thinking_budget": 100}
        manager.preferred_sampling_params = {"custom_params": mine, "min_new_tokens": 4}
        sent = await _sent(manager, _obj(_prompt(TWO, ONE)))
        marked = {} if opted_out else {"documents": BOUNDS, "documents_repair": "none"}
        assert sent[-1].sampling_params.custom_params == {**mine, **marked}
        assert sent[-1].sampling_params.min_new_tokens == 4
        assert len(sent) == (1 if opted_out else 3)

    auto(test)


class WithQueue:
    """SGLang's settled flags, which cannot be changed, with ``--max-queued-requests``."""

    def __init__(self, flags: Any, max_queued_requests: int | None) -> None:
        self._flags = flags
        self.max_queued_requests = max_queued_requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flags, name)


@pytest.mark.parametrize(("queued", "together"), [(None, 16), (4, 4), (1, 1), (100, 16)])
def test_prefills_do_not_fill_the_queue(
    run: Callable[..., None],  # noqa: F811
    queued: int | None,
    together: int,
) -> None:
    async def test(manager: Any) -> None:
        prompt = [DRAW.randrange(3, 90) for _ in range(8 + 4 * 21)]
        spans = [(8 + 4 * at, 12 + 4 * at) for at in range(20)]
        obj = _obj(prompt, sampling={"custom_params": {"documents": spans}})
        manager.server_args = WithQueue(manager.server_args, queued)
        manager.sent.clear()
        task = asyncio.ensure_future(_all_of(manager, obj))
        answered = set[str]()
        sizes = []
        while not task.done():
            await _turns()
            new = [each for each in manager.received() if each.rid not in answered]
            sizes.append(len(new))
            for each in new:
                answered.add(each.rid)
                await manager.finish(each.rid)
        await task
        assert max(sizes) == together and len(answered) == 21

    run(test)


@pytest.mark.parametrize("streams", [True, False])
def test_a_prefill_that_finds_the_queue_full_leaves_the_decision_to_sglang(
    run: Callable[..., None],  # noqa: F811
    streams: bool,
) -> None:
    """SGLang decides on the request itself. It would not refuse it for the prefills of its documents."""

    async def test(manager: Manager) -> None:
        obj = _obj(
            _prompt(ONE, TWO),
            sampling={"custom_params": {"documents": [(20, 90), (90, 170)]}},
            stream=streams,
        )
        manager.sent.clear()
        task = asyncio.ensure_future(_all_of(manager, obj))
        await _turns()
        [prefill] = manager.received()
        full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        await manager.finish(prefill.rid, full)
        await _turns()
        *_, own = manager.received()
        assert own.rid == obj.rid and len(manager.received()) == 2
        await manager.finish(own.rid)
        await task

    run(test)


def test_a_batch_and_embeddings_find_nothing(auto: Callable[..., None]) -> None:
    async def test(manager: Manager) -> None:
        for obj in (
            _obj([_prompt(TWO, ONE), _prompt(TWO, ONE)]),
            _obj(None, text=["one", "two"]),
            _obj([]),
            _obj(_prompt(TWO, ONE), image_data="image"),
            _obj(_prompt(TWO, ONE), return_hidden_states=True),
            _obj(_prompt(TWO, ONE), sampling={"custom_params": {"reasoncache": "perhaps"}}),
        ):
            assert not documents._may_compose(manager, obj)
        calls = []

        def original(*args: Any) -> Any:
            calls.append(args)
            return TokenizerManager.generate_request(*args)

        obj = EmbeddingReqInput(input_ids=_prompt(TWO, ONE))
        documents.around_generate(original, manager, obj)
        assert calls == [(manager, obj, None)]

    auto(test)


def test_an_error_of_ours_ends_finding_and_no_request(auto: Callable[..., None]) -> None:
    async def test(manager: Manager) -> None:
        await _learn(manager)
        getattr(manager, FINDER)._index = None
        for _ in range(2):
            assert not _marks(await _sent(manager, _obj(_prompt(TWO, ONE))))
            assert getattr(manager, FINDER) is None

    auto(test)


def test_marked_documents_alone_by_default(run: Callable[..., None]) -> None:  # noqa: F811
    async def test(manager: Manager) -> None:
        for texts in ((ONE, TWO), (THREE, ONE), (TWO, ONE)):
            assert not _marks(await _sent(manager, _obj(_prompt(*texts))))
        assert not hasattr(manager, FINDER)

    run(test)
