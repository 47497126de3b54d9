# SPDX-License-Identifier: Apache-2.0
"""Tests ``deploy/`` (Grafana board, alert rules, configuration) with a real Prometheus, and the page at
``GET /reasoncache/ui`` in a browser, behind a proxy with a path prefix.

``REASONCACHE_SCREENSHOT=docs/page.png`` saves a picture of the page, taken during three minutes of load."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

from eval.runs.servers import Server
from eval.serving import ServerProcess, free_port, kill_when_we_die
from tests.server import specs
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import problems, prompts, report, solve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
QUERIES = [
    target["expr"]
    for panel in json.loads((DEPLOY / "grafana/reasoncache.json").read_text())["panels"]
    for target in panel["targets"]
]
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus and promtool: apt-get install prometheus",
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_alerts_ring_and_are_silent(tmp_path: Path) -> None:
    promtool("check", "rules", ALERTS)
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")
    retracts = "ReasoncacheRetractsBesideShareableSlots"
    gauges = {
        "ReasoncacheDisabled": "disabled",
        "ReasoncacheUncorrected": "uncorrected",
        "ReasoncacheFilterGivenUp": "filter_given_up",
    }

    def case(series: dict[str, str], *ringing: str) -> dict[str, Any]:
        """``ringing``: names of the alerts that fire after 20 minutes. All other alerts are silent."""
        labels = {name: {"instance": "a", "dp_rank": "0"} for name in gauges}
        labels[retracts] = {"instance": "a"}
        return {
            "interval": "15s",
            "input_series": [
                {"series": f'sglang:{name}{{instance="a",dp_rank="0"}}', "values": values}
                for name, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": "20m",
                    "exp_samples": [{"labels": "{}", "value": int(name in ringing)}],
                }
                for name in labels
            ],
        }

    shareable = "reasoncache_slots_shareable_now"
    retracted = "num_retracted_requests_total"
    cases = [case({f"reasoncache_{field}": "0x20 1x80"}, name) for name, field in gauges.items()]
    cases.append(case({f"reasoncache_{field}": "0x100" for field in gauges.values()}))
    cases.append(case({retracted: "0+1x100", shareable: "40x100"}, retracts))
    # No alert fires if no slot was shareable for a moment, or if no request was retracted.
    cases.append(case({retracted: "0+1x100", shareable: "40x70 0 40x30"}))
    cases.append(case({retracted: "7x100", shareable: "40x100"}))
    rules = {"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": cases}
    path = tmp_path / "cases.yml"
    path.write_text(json.dumps(rules))
    promtool("test", "rules", path)


def test_what_compose_mounts_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    assert compose["services"].keys() == {"sglang", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_dir()
        for config in service.get("configs", ()):
            yaml.safe_load(compose["configs"][config["source"]]["content"])


def _filled(query: str) -> str:
    """The query, with Grafana's variables replaced by values."""
    query = query.replace("$__rate_interval", "1m")
    return query.replace("$model_name", ".*").replace("$instance", ".*")


@needs_prometheus
@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_every_query_of_the_board_returns_data(server: ServerProcess, tmp_path: Path) -> None:
    """Prometheus scrapes a server under load, with the configuration of ``deploy/`` but a shorter interval."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config |= {"rule_files": [str(ALERTS)], "global": {"scrape_interval": "500ms"}}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.split("/")[2]]}]
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    flags = {"config.file": f"{tmp_path}/prometheus.yml", "storage.tsdb.path": f"{tmp_path}/data"}
    flags |= {"web.listen-address": address}
    command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        guard = kill_when_we_die(process.pid)
        try:

            def ask(path: str, **params: str) -> Any:
                told = httpx.get(f"http://{address}/api/v1/{path}", params=params, trust_env=False)
                return told.raise_for_status().json()["data"]

            # Prometheus answers with 503 until it is ready. The first scrape comes after five seconds.
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if ask("query", query="up == 1")["result"]:
                        break
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
            solve(server, problems(10, seed=72))
            time.sleep(1)
            queries = [_filled(query) for query in QUERIES]
            assert len(queries) > 15
            assert not [query for query in queries if not ask("query", query=query)["result"]]
            rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
            assert len(rules) == 4 and {rule["health"] for rule in rules} <= {"ok", "unknown"}
            shared = ask("query", query="sum(increase(sglang:reasoncache_slots_saved_total[1m]))")
            assert float(shared["result"][0]["value"][1]) > 0
        finally:
            process.terminate()
            process.wait(20)
            guard.kill()
            guard.communicate()


PREFIX = "/behind/a/proxy"
KEY = "let me in"
HOSTILE = "<img src=x onerror=hit()><script>hit()</script>"
PICTURE = os.environ.get("REASONCACHE_SCREENSHOT")
IN_TEXT = "" if PICTURE else HOSTILE


@contextlib.contextmanager
def proxy(server: ServerProcess) -> Iterator[ThreadingHTTPServer]:
    """Forwards requests whose path begins with PREFIX. Demands KEY for reports on single requests. Puts IN_TEXT
    before the text of each response, because the embedded reasoner has no tokens to generate IN_TEXT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix(PREFIX)
            single = path.startswith(("/reasoncache/details", "/reasoncache/response"))
            if path == self.path or (single and self.headers["Authorization"] != f"Bearer {KEY}"):
                return self._send(404 if path == self.path else 401, {}, b"")
            told = httpx.get(server.url + path, trust_env=False, timeout=60)
            body = told.content
            if path.startswith("/reasoncache/response"):
                found = told.json()
                for part in (found["parts"] or ())[:1]:
                    part["text"] = IN_TEXT + part["text"]
                body = json.dumps(found).encode()
            names = ("content-type", "content-security-policy")
            kept = {name: told.headers[name] for name in names if name in told.headers}
            self._send(told.status_code, kept, body)

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a Chromium that Playwright drives."""
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
    state = page.locator("#state")
    text = page.locator("#text")
    rows = page.locator("#recent tr")

    def shared() -> int:
        return int(report(server)["totals"]["blocks_shared"])

    def load() -> None:
        end = time.monotonic() + (180 if PICTURE else 0)
        begun = shared()
        for seed in range(70, 200 if PICTURE else 76):
            solve(server, problems(72 if PICTURE else 18, seed=seed))
            if time.monotonic() > end and shared() > begun:
                break
        generate(server, prompts(1, seed=1)[0], 300, rid=HOSTILE)

    with proxy(server) as between, ThreadPoolExecutor(1) as pool:
        page.goto(f"http://127.0.0.1:{between.server_port}{PREFIX}/reasoncache/ui")
        expect(state).to_have_text("on")
        expect(page.locator("#norecent")).to_contain_text("admin key")
        page.fill("#admin", KEY)
        page.click("#ask button")
        expect(page.locator("#ask")).to_be_hidden()
        done = pool.submit(load)
        # Without a click, the page opens a finished response that shared.
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
        assert {url.partition(PREFIX)[0] for url in asked} == {
            f"http://127.0.0.1:{between.server_port}"
        }
    expect(state).to_have_text("server gone", timeout=15_000)
    expect(page.locator("#on")).to_contain_text("No answer since")
    assert not faults


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_a_refresh_takes_the_scheduler_less_than_sglangs_own_report(server: ServerProcess) -> None:
    """Compares the scheduler's CPU time for a refresh of the page and for ``/server_info``."""
    solve(server, problems(6, seed=71))
    wait_until_idle(server)
    one = Server(server)
    count = 100
    spent = list[float]()
    ours = "/v1/loads?include=core", "/reasoncache/details?blocks=false"
    for paths in (ours, ["/server_info"]):
        before = one.cpu_seconds()
        for path in [*paths] * count:
            assert server.get(path).status_code == 200
        spent.append(1e3 * (one.cpu_seconds() - before) / count)
    print(f"{spent[0]:.2f} ms of the scheduler a refresh, /server_info {spent[1]:.2f} ms")
    assert spent[0] < spent[1]
