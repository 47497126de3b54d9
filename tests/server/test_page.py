# SPDX-License-Identifier: Apache-2.0
"""The page at ``GET /reasoncache/ui`` in a browser, behind a proxy with a path prefix.

``REASONCACHE_SCREENSHOT=docs/page.png`` keeps the picture, after three minutes of load."""

import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from eval.runs.servers import Server
from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import problems, prompts, report, solve

HOST, KEY = "http://page.test", "let me in"
PROXY = f"{HOST}/behind/a/proxy"
HOSTILE = "<img src=x onerror=hit()><script>hit()</script>"
PICTURE = os.environ.get("REASONCACHE_SCREENSHOT")
IN_TEXT = "" if PICTURE else HOSTILE


def answer(server: ServerProcess, route: Any) -> None:
    """Acts as a proxy: forwards paths that begin with PROXY, demands KEY for single requests, and puts IN_TEXT
    before the text of each response, as the embedded model has no tokens for IN_TEXT."""
    path = route.request.url.removeprefix(PROXY)
    single = path.startswith(("/reasoncache/details", "/reasoncache/response"))
    if path == route.request.url:
        return route.fulfill(status=404)
    if single and route.request.headers.get("authorization") != f"Bearer {KEY}":
        return route.fulfill(status=401)
    told = httpx.get(server.url + path, trust_env=False, timeout=60)
    body = told.content
    if path.startswith("/reasoncache/response"):
        found = told.json()
        for part in (found["parts"] or ())[:1]:
            part["text"] = IN_TEXT + part["text"]
        body = json.dumps(found).encode()
    names = ("content-type", "content-security-policy")
    kept = {name: told.headers[name] for name in names if name in told.headers}
    return route.fulfill(status=told.status_code, headers=kept, body=body)


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of Playwright's synchronous client."""
    client = pytest.importorskip("playwright.sync_api", reason="the Python package playwright")
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    if (path := next(found, None)) is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with client.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1160, "height": 900})
        browser.close()


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_a_stranger_sees_what_it_does(server: ServerProcess, page: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    asked: list[str] = []
    faults: list[Any] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(error))
    state, text, rows = page.locator("#state"), page.locator("#text"), page.locator("#recent tr")

    def shared() -> int:
        return int(report(server)["totals"]["blocks_shared"])

    def load() -> None:
        end, begun = time.monotonic() + (180 if PICTURE else 0), shared()
        for seed in range(70, 200 if PICTURE else 76):
            solve(server, problems(72 if PICTURE else 18, seed=seed))
            if time.monotonic() > end and shared() > begun:
                break
        generate(server, prompts(1, seed=1)[0], 300, rid=HOSTILE)

    page.route("**/*", functools.partial(answer, server))
    with ThreadPoolExecutor(1) as pool:
        page.goto(f"{PROXY}/reasoncache/ui")
        expect(state).to_have_text("on")
        expect(page.locator("#norecent")).to_contain_text("admin key")
        page.fill("#admin", KEY)
        page.click("#ask button")
        expect(page.locator("#ask")).to_be_hidden()
        done = pool.submit(load)
        # The page opens a finished response that shares by itself.
        expect(text.locator(".shared")).not_to_have_count(0, timeout=60_000)
        expect(text).to_contain_text(IN_TEXT)
        text.locator(".shared").first.hover()
        expect(text.locator(".source")).not_to_have_count(0)
        assert "read the slots of" in text.locator(".shared").first.get_attribute("title")
        path = Path(PICTURE or tmp_path / "page.png")
        if PICTURE:
            page.wait_for_timeout(120_000)
            expect(page.locator("#gave")).to_have_text(re.compile(", [1-9].* now"), timeout=60_000)
        page.screenshot(path=path, full_page=True)
        Image.open(path).convert("RGB").quantize(160).save(path, optimize=True)
        assert path.stat().st_size > 20_000
        while not done.done():
            page.wait_for_timeout(200)
        done.result()
        expect(rows.nth(1)).to_contain_text("<img src=x onerror=hit()", timeout=10_000)
        assert page.evaluate("[document.querySelectorAll('img, script').length, window.hit]") == [
            1,
            None,
        ]
        expect(page.locator("#on")).to_have_text("On")
        expect(page.locator("#gives")).to_have_text(re.compile("^Up to [1-9]|^No slots"))
        expect(page.locator("#does")).to_contain_text("% of tokens read shared KV")
        expect(page.locator("#refusals tr")).not_to_have_count(1)
        assert page.locator("#slots path").count() > 5
    assert all(url.startswith(PROXY) for url in asked)
    page.unroute_all(behavior="ignoreErrors")
    page.route("**/*", lambda route: route.abort())
    expect(state).to_have_text("server gone", timeout=15_000)
    expect(page.locator("#on")).to_contain_text("No answer since")
    assert not faults


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_a_refresh_takes_the_scheduler_less_than_a_millisecond(server: ServerProcess) -> None:
    """Measures the requests that the page makes for one refresh."""
    solve(server, problems(6, seed=71))
    wait_until_idle(server)
    one, count = Server(server), 100
    before = one.cpu_seconds()
    for _ in range(count):
        for path in ("/v1/loads?include=core", "/reasoncache/details?blocks=false"):
            assert server.get(path).status_code == 200
    spent = 1e3 * (one.cpu_seconds() - before) / count
    print(f"{spent:.2f} ms of the scheduler a refresh")
    assert spent < 1
