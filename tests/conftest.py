# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Tests share running servers: see ``tests/server/harness.py``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from eval.serving import ServerProcess
from tests import forked

if TYPE_CHECKING:
    from tests.server.harness import ServerPool

ROOT = Path(__file__).resolve().parent.parent
_SERVER_TESTS = ROOT / "tests" / "server"

# Machines may be slow, and run other programs.
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")


def pytest_configure(config: pytest.Config) -> None:
    """Makes SIGTERM raise an exception, as Ctrl-C does, so that fixtures still end their servers. Servers and
    their processes are forked unless a ``ServerSpec`` forbids it, because most of a start is imports."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["REASONCACHE_FORK"] = "1"
    ServerProcess.launch = forked.launch


@pytest.hookimpl(tryfirst=True)  # runs before pytest-xdist looks for the groups made here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks server tests and sorts them by server (parameter ``server`` or ``spec``), so that each server
    starts once. Without pytest-xdist they run last. With it they run first, each ``ServerSpec.group`` on one
    worker, and tests marked ``slow`` come next, so that no worker has a long test left at the end."""
    parallel = hasattr(config, "workerinput")
    first_use: dict[str, int] = {}

    def order(item: pytest.Item) -> tuple[int, int, int]:
        if item.path.is_relative_to(_SERVER_TESTS):
            item.add_marker(pytest.mark.server)
        if item.get_closest_marker("server") is None:
            slow = item.get_closest_marker("slow") is not None
            return (1 if slow else 2) if parallel else -1, 0, 0
        params = item.callspec.params if hasattr(item, "callspec") else {}
        spec = params.get("server", params.get("spec"))
        if spec and spec.long:
            item.add_marker(pytest.mark.long)
        # Server tests without a spec are grouped by their file.
        name = spec.name if spec else item.path.name
        group = f"group {spec.group or name}" if spec else name
        if parallel:
            item.add_marker(pytest.mark.xdist_group(group))
        first, then = (first_use.setdefault(key, len(first_use)) for key in (group, name))
        return 0, first, then

    items.sort(key=order)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes each failure at once to the file descriptor that REASONCACHE_FAILURES names, because pytest shows
    no failure if a signal ends the run. Under pytest-xdist only the controller process writes."""
    to = os.environ.get("REASONCACHE_FAILURES")
    if to and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()[-25:]
        os.write(int(to), "\n".join([f"FAILED {report.nodeid}", *lines, ""]).encode())


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills uninitialized memory with NaN, so that a test notices elements that were never written."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Exempts all existing objects from garbage collection, because visiting them takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_path() -> Path:
    given = os.environ.get("REASONCACHE_TEST_MODEL")
    path = Path(given) if given else ROOT / "eval" / "tiny_reasoner" / "checkpoint"
    if not (path / "config.json").is_file():
        pytest.fail(f"no model at {path}: set REASONCACHE_TEST_MODEL or train one", pytrace=False)
    return path


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    """The tokenizer and the fp32 Hugging Face model. Its attention is eager, so that a test can mask it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    )
    return AutoTokenizer.from_pretrained(model_path), model.eval()


@pytest.fixture(scope="session")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The servers of all tests; at most REASONCACHE_TEST_SERVERS (default 2) are alive at once."""
    # Imported here so that unit tests need no server dependencies.
    from tests.server.harness import ServerPool

    capacity = int(os.environ.get("REASONCACHE_TEST_SERVERS", "2"))
    pool = ServerPool(model_path, tmp_path_factory.mktemp("servers"), capacity)
    yield pool
    pool.close()


@pytest.fixture
def server(servers: ServerPool, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """The server for the ``ServerSpec`` in ``request.param``. After the test, the server is checked."""
    from tests.server.harness import assert_whole

    process = servers.get(request.param)
    log_start = process.log_size()
    yield process
    assert_whole(process, log_start)


def pytest_make_parametrize_id(val: object) -> str | None:
    from tests.server.specs import ServerSpec

    return val.name if isinstance(val, ServerSpec) else None


@pytest.fixture
def published_config() -> Iterator[None]:
    """Makes SGLang use its default configuration for the CPU during one test."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(device="cpu", attention_backend="torch_native"):
        yield


@pytest.fixture
def out_of_tree_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes SGLang's rotary module use our platform. Otherwise it may try to import a kernel of vLLM."""
    from sglang.srt.layers.rotary_embedding import base

    from sglang_reasoncache.cpu.platform import TorchCpuPlatform

    monkeypatch.setattr(base, "current_platform", TorchCpuPlatform())
