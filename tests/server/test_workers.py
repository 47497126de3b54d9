# SPDX-License-Identifier: Apache-2.0
"""Tests a server with two processes that serve HTTP (``--tokenizer-worker-num``) and load no plugins.
Which process accepts a connection is left to the kernel, so requests are sent over several connections."""

from typing import Any

import httpx
import pytest

from eval.serving import MODEL_NAME, ServerProcess, wait_until_idle
from sglang_reasoncache.custom_params import HEADER
from tests.server import specs
from tests.server.harness import generate
from tests.server.problems import TO_THE_END, prompts

pytestmark = pytest.mark.parametrize("server", [specs.WORKERS], indirect=True)
CONNECTIONS = 16


def _statuses(server: ServerProcess, method: str, path: str, **options: Any) -> set[int]:
    """The statuses of the same request over several connections."""
    found = set()
    for _ in range(CONNECTIONS):
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            found.add(client.request(method, path, **options).status_code)
    return found


def test_paths_and_key(server: ServerProcess) -> None:
    """What shows other clients' requests needs the key."""
    assert _statuses(server, "GET", "/reasoncache") == {200}
    assert _statuses(server, "GET", "/reasoncache/ui") == {200}
    for path in ("/reasoncache/details", "/reasoncache/response?rid=any"):
        assert _statuses(server, "GET", path) == {401}
        for key, status in (("wrong", 401), (specs.ADMIN_KEY, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert _statuses(server, "GET", path, headers=headers) == {status}


def test_wrong_parameters_are_refused(server: ServerProcess) -> None:
    for custom in ({"reasoncache": "perhaps"}, {"documents": [[5, 1]]}):
        body = {"input_ids": [5] * 20, "sampling_params": {"custom_params": custom}}
        assert _statuses(server, "POST", "/generate", json=body) == {400}


def _opted_out(server: ServerProcess) -> int:
    wait_until_idle(server)
    [told] = server.get("/reasoncache").json()["schedulers"]
    found: int = told["totals"]["requests_opted_out"]
    return found


def test_the_header_opts_out_and_is_checked(server: ServerProcess) -> None:
    """In APIs whose requests have no ``custom_params``."""
    before = _opted_out(server)
    ask: dict[str, Any] = {"model": MODEL_NAME, "input": "1 + 2 =", "max_output_tokens": 4}
    for value, status in (("false", 200), ("maybe", 400)):
        headers = {HEADER: value}
        assert _statuses(server, "POST", "/v1/responses", json=ask, headers=headers) == {status}
    assert _opted_out(server) == before + CONNECTIONS


def test_a_response_shares_and_says_what_it_read(server: ServerProcess) -> None:
    for text in prompts(3, seed=5):
        sampling = {
            **TO_THE_END["sampling_params"],
            "custom_params": {"reasoncache": {"record": True}},
        }
        told = generate(server, text, 400, sampling_params=sampling)["meta_info"]["reasoncache"]
        assert told["blocks"] and told["continued"] is None


def test_documents_are_prefilled_first(server: ServerProcess) -> None:
    prompt = [*range(5, 25)] * 6
    custom = {"documents": [[8, 60], [60, 110]]}
    for _ in range(4):
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 4, "custom_params": custom},
        }
        answer = httpx.post(f"{server.url}/generate", json=body, trust_env=False, timeout=60).json()
        assert answer["meta_info"]["cached_tokens"] == 110
