# SPDX-License-Identifier: Apache-2.0
"""``deploy/``: the board, the alert rules and the configuration, with a real Prometheus."""

import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from eval.serving import ServerProcess, free_port, kill_when_we_die
from tests.server import specs
from tests.server.problems import problems, solve

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
        """``ringing``: names of the alerts that fire after 20 minutes; all others are silent."""
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

    shareable, retracted = "reasoncache_slots_shareable_now", "num_retracted_requests_total"
    cases = [case({f"reasoncache_{field}": "0x20 1x80"}, name) for name, field in gauges.items()]
    cases.append(case({f"reasoncache_{field}": "0x100" for field in gauges.values()}))
    cases.append(case({retracted: "0+1x100", shareable: "40x100"}, retracts))
    # No alert fires if shareable slots ran out first, or no request was retracted.
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
    """The query with values for Grafana's variables."""
    query = query.replace("$__rate_interval", "1m")
    return query.replace("$model_name", ".*").replace("$instance", ".*")


@needs_prometheus
@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_every_query_of_the_board_returns_data(server: ServerProcess, tmp_path: Path) -> None:
    """Prometheus runs with the configuration of ``deploy/``, and scrapes a server under load."""
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

            # Prometheus starts to scrape only after five seconds.
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
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
