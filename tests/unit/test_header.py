# SPDX-License-Identifier: Apache-2.0
"""Tests the HTTP header by which requests opt out: what it says, which requests it reaches, who refuses it."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_reasoncache import compat
from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import HEADER, ROUTED_HEADER, asked_of, header_value
from sglang_reasoncache.plugin import documents, header
from tests.unit.test_requests import SPELLINGS
from tests.unit.test_waiting import Manager, _all_of, _turns, run  # noqa: F401

OFF = {"reasoncache": False}
RECORD = {"reasoncache": {"record": True}}


def _request(*values: str) -> Request:
    """An HTTP request with these lines of our header, whose client stays."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    lines = [(HEADER.lower().encode(), value.encode()) for value in values]
    return Request(
        {"type": "http", "method": "POST", "headers": [(b"accept", b"*/*"), *lines]}, receive
    )


def _received(manager: Manager) -> list[Any]:
    """The requests that the scheduler has received, those of a batch apart."""
    return [one for sent in manager.sent for one in getattr(sent, "batch", [sent])]


WORDS = [
    (shares, word)
    for shares in SPELLINGS
    for word in SPELLINGS[shares]
    if isinstance(word, str) and word
]


@pytest.mark.parametrize(("shares", "word"), WORDS)
def test_words_are_those_of_custom_params(shares: bool | None, word: str) -> None:
    for line in (word, f'"{word}"'):
        if shares is None:
            with pytest.raises(ValueError, match=f"{HEADER} must be true or false, got '{word}'"):
                header_value([line])
        else:
            assert asked_of({"reasoncache": header_value([line, line])}).share == shares


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("null", None),
        ("0", 0),
        ('{"record": true}', {"record": True}),
        ('{"share": "off"}', {"share": "off"}),
    ],
)
def test_json_is_that_of_custom_params(line: str, value: object) -> None:
    assert header_value([line]) == value


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["[" * 100], "must be true or false, got '[[["),
        (["{" * 101], "must have at most 100 characters, got 101"),
        (["9" * 100], "must be true or false, got 999"),
        (["NaN"], "must be true or false, got nan"),
        (["false, false"], "must be true or false, got 'false, false'"),
        (['{"off": 1}'], "has the keys share, record, got ['off']"),
        (['{"share": null}'], "share must be true or false, got None"),
        (["false", "true"], "must have one value, got ['false', 'true']"),
        (["false", '{"record": true}'], "must have one value, got ['false', "),
        (["x" * 10**6, "y"], "must have at most 100 characters, got 1000000"),
    ],
)
def test_wrong_values_are_refused_briefly(lines: list[str], told: str) -> None:
    with pytest.raises(ValueError, match="X-Reasoncache") as raised:
        header_value(lines)
    assert told in str(raised.value) and len(str(raised.value)) < 140


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ([], None),
        (["", " "], None),
        (["", " off "], "off"),
        (["false", "0", "False"], False),
        (['{"record":true}', '{"record": true}'], {"record": True}),
    ],
)
def test_lines_that_mean_the_same_are_one(lines: list[str], value: object) -> None:
    """A client and a gateway may both set it; a template may leave it empty."""
    assert header_value(lines) == value


@pytest.mark.parametrize(
    ("params", "custom"),
    [
        (None, OFF),
        ({"max_new_tokens": 4}, OFF),
        ({"custom_params": None}, OFF),
        ({"custom_params": {"thinking_budget": 3}}, {"thinking_budget": 3, **OFF}),
        ({"custom_params": {"reasoncache": None}}, OFF),
        ({"custom_params": RECORD}, RECORD),
        ({"custom_params": {"reasoncache": True}}, {"reasoncache": True}),
        ({"n": 2}, OFF),
    ],
)
@pytest.mark.parametrize("batch", ["", "alike", "each"])
def test_the_header_reaches_every_request(
    run: Callable[..., None],  # noqa: F811
    params: dict[str, Any] | None,
    custom: Any,
    batch: str,
) -> None:
    """It is read only where ``custom_params`` say nothing. The caller may use its parameters again. A later
    request without the header shares."""
    given = None if params is None else dict(params)

    async def test(manager: Manager) -> None:
        for client in (_request("off"), _request()):
            prompt: Any = [[5, 6, 7], [6, 7, 8]] if batch else [5, 6, 7]
            sampling: Any = [params or {}, params or {}] if batch == "each" else params
            obj = GenerateReqInput(input_ids=prompt, sampling_params=sampling)
            manager.sent.clear()
            task = asyncio.ensure_future(_all_of(manager, obj, client))
            answered = set[str]()
            while not task.done():
                await _turns()
                for each in [each for each in _received(manager) if each.rid not in answered]:
                    answered.add(each.rid)
                    await manager.finish(each.rid)
            await task
            assert params == given
            expected = custom if client.headers.get(HEADER) else (params or {}).get("custom_params")
            assert len(answered) >= (2 if batch else 1) * (params or {}).get("n", 1)
            for each in _received(manager):
                found = each.sampling_params.custom_params
                assert asked_of(found) == asked_of(expected)
                assert (found or {}).keys() == (expected or {}).keys()

    run(test)


def test_it_changes_nothing_else() -> None:
    """The operator's defaults stay, except what the header says. What SGLang refuses is handed on."""
    defaults = {"custom_params": {"thinking_budget": 9, "reasoncache": True}}
    manager = SimpleNamespace(preferred_sampling_params=defaults)
    obj: Any = GenerateReqInput(text="a")
    header.apply(manager, obj, _request("0"))
    assert obj.sampling_params == {"custom_params": {"thinking_budget": 9, "reasoncache": 0}}
    assert defaults == {"custom_params": {"thinking_budget": 9, "reasoncache": True}}
    for params in ("text", {"custom_params": [1]}):
        obj = GenerateReqInput(text="a", sampling_params=params)  # type: ignore[arg-type]
        header.apply(manager, obj, _request("0"))
        assert obj.sampling_params is params
    for request in (None, SimpleNamespace(), _request(), _request("null")):
        obj = GenerateReqInput(text="a")
        header.apply(manager, obj, request)
        assert obj.sampling_params is None
    with pytest.raises(ValueError, match="got 'maybe'"):
        header.apply(manager, obj, _request("maybe"))


def test_every_turn_of_a_tool_loop_opts_out() -> None:
    """SGLang's Responses API makes a new request for each turn, in a task that may outlive the HTTP request."""
    seen = list[dict[str, Any]]()

    class Turns:
        def append_output(self, _output: Any) -> None: ...

        def need_builtin_tool_call(self) -> bool:
            return len(seen) < 3

        async def call_tool(self) -> None: ...

        def render_for_completion(self) -> list[int]:
            return [5, 6]

    async def stock(_manager: Any, obj: Any, _request: Any) -> Any:
        seen.append(dict(obj.sampling_params))
        yield {}

    manager: Any = SimpleNamespace(
        preferred_sampling_params=None,
        server_args=SimpleNamespace(**{CONFIG: ReasonCacheConfig()}),
        model_config=SimpleNamespace(context_len=99),
        num_reserved_tokens=0,
    )
    manager.generate_request = lambda obj, request: documents.around_generate(
        stock, manager, obj, request
    )
    serving: Any = SimpleNamespace(tokenizer_manager=manager, is_disaggregated=False)
    sampling = {"max_new_tokens": 9}
    first = GenerateReqInput(text="a", sampling_params=sampling)

    async def whole() -> None:
        turns = OpenAIServingResponses._generate_with_builtin_tools(
            serving,
            "r",
            "a",
            first,
            sampling,
            Turns(),
            raw_request=_request("false"),  # type: ignore[arg-type]
        )
        await asyncio.create_task(_drain(turns))

    asyncio.run(whole())
    assert [each["custom_params"] for each in seen] == [OFF] * 3
    assert sampling == {"max_new_tokens": 97}


async def _drain(answers: Any) -> None:
    async for _ in answers:
        pass


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    made = FastAPI()
    monkeypatch.setattr(compat, "http_app", made, raising=False)

    @made.api_route("/plain", methods=["GET", "POST"])
    async def plain() -> str:
        return "served"

    header.add_check()
    header.add_check()
    assert len(made.user_middleware) == 1
    yield made


@pytest.mark.parametrize("name", [HEADER, ROUTED_HEADER, HEADER.upper()])
def test_a_wrong_header_is_refused_before_any_api(app: FastAPI, name: str) -> None:
    """On one connection only the request that has it is refused, and only if it has SGLang's key."""
    add_api_key_middleware(app, api_key="key", admin_api_key=None)
    with TestClient(app) as client:
        assert client.post("/plain", headers={name: "maybe"}).status_code == 401
        client.headers["Authorization"] = "Bearer key"
        for value in ("false", None, "null"):
            assert client.post("/plain", headers={name: value} if value else {}).json() == "served"
        assert client.get("/plain", headers={name: "maybe"}).json() == "served", "a probe"
        for path in ("/plain", "/none"):
            refused = client.post(path, headers={name: "maybe"})
            assert refused.status_code == 400 and "got 'maybe'" in refused.text
        other = ROUTED_HEADER if name == HEADER else HEADER
        both = [(name, "true"), (other, "false")]
        assert "must have one value" in client.post("/plain", headers=both).text
