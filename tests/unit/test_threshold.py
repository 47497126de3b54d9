# SPDX-License-Identifier: Apache-2.0
"""The adaptive threshold against numpy's percentile, and its saved state: in a file that is keyed,
atomic, bounded, honest about corruption, and kept across restarts."""

import json
import math
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin.server import ServerParts, agreed, fingerprint
from sglang_reasoncache.sharing import calibration
from sglang_reasoncache.sharing.calibration import (
    CalibratedThreshold,
    CalibrationKey,
    load,
    save,
)
from sglang_reasoncache.sharing.histogram import Histogram
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

_DISTANCE = st.one_of(st.just(0.0), st.floats(1e-7, 999.0), st.sampled_from([0.01, 0.02, 1.0]))
_DISTANCES = st.lists(_DISTANCE, min_size=1, max_size=60)


def histogram_of(distances: list[float], half_life: float | None = None) -> Histogram:
    histogram = Histogram(half_life)
    for distance in distances:
        histogram.observe(distance)
    return histogram


@settings(deadline=None)
@given(_DISTANCES, st.floats(0, 100))
def test_percentile_is_within_one_percent_of_numpy(distances: list[float], p: float) -> None:
    exact = float(np.percentile(distances, p))
    found = histogram_of(distances).percentile(p)
    assert exact * (1 - 1e-9) <= found <= exact * 1.01


@pytest.mark.parametrize("scale", [1e-5, 0.05, 5.0])
def test_percentile_of_many_distances(scale: float) -> None:
    distances = np.random.default_rng(1).lognormal(math.log(scale), 1.0, 5000)
    histogram = histogram_of(distances.tolist())
    for p in (1, 20, 50, 80, 95, 99.9):
        assert histogram.percentile(p) == pytest.approx(np.percentile(distances, p), rel=0.01)


def test_every_distance_is_at_most_the_edge_of_its_bin() -> None:
    """Also just below the edges, where the logarithm rounds across them."""
    for edge in (1e-7 * 10.0 ** (np.arange(1, 2560) / 256)).tolist():
        for distance in (edge * (1 - 1e-11), math.nextafter(edge, 0), edge, edge * (1 + 1e-15)):
            assert distance <= histogram_of([distance]).percentile(50) <= distance * 1.011


def test_under_and_overflow_are_counted_at_the_ends() -> None:
    assert histogram_of([1e-12, 1e-9]).percentile(50) == pytest.approx(1e-7)
    assert histogram_of([1e5, 1e9]).percentile(50) == 1e3
    threshold = AdaptiveThreshold(percentile=50, warmup=1)
    assert threshold.decide([1e5, 1e9]).tolist() == [False, False]


def weighted_percentile(distances: list[float], half_life: float, p: float) -> float:
    """Slow reference of the decayed percentile by sorting all observations."""
    order = np.argsort(distances, kind="stable")
    below = (2.0 ** (-np.arange(len(order))[::-1] / half_life))[order].cumsum()
    rank = (below[-1] - 1) * p / 100
    whole = math.floor(rank)
    places = np.searchsorted(below, np.array([whole, whole + 1]) + 1e-9, side="right")
    low, high = np.array(distances)[order[places.clip(max=len(order) - 1)]]
    return low + (high - low) * (rank - whole)


@pytest.mark.parametrize("half_life", [3.3, 7.0, 300.0])
def test_decay_forgets_old_distances(half_life: float) -> None:
    rng = np.random.default_rng(2)
    distances = rng.lognormal(0, 0.5, 3000).tolist() + rng.lognormal(2, 0.5, 60).tolist()
    histogram = histogram_of(distances, half_life)
    for p in (20, 50, 80):
        expected = weighted_percentile(distances, half_life, p)
        assert histogram.percentile(p) == pytest.approx(expected, rel=0.01)


def test_what_is_accepted_follows_what_was_observed() -> None:
    """Nothing before the warm-up is over; at zero percent never, at a hundred everything."""
    nothing = AdaptiveThreshold(percentile=0, warmup=0)
    everything = AdaptiveThreshold(percentile=100, warmup=3)
    distances = [0.0, 1e-9, 0.5, 1e6]
    assert not nothing.decide(distances).any()
    assert not everything.decide(distances[:2]).any()
    assert everything.decide(distances).all() and everything.accepts(1e300)
    assert not AdaptiveThreshold(percentile=80, warmup=0).accepts(0.0), "nothing observed"
    threshold = AdaptiveThreshold(percentile=80, warmup=10)
    for count in range(1, 11):
        assert not threshold.accepts(0.0)
        threshold.observe(0.5)
        assert threshold.num_observed == count
    assert threshold.accepts(0.5) and not threshold.accepts(0.6)
    threshold.decide([3.0] * 10)
    assert threshold.accepts(2.9)


def test_what_is_no_distance_is_neither_observed_nor_accepted() -> None:
    for distance in (math.nan, math.inf, -math.inf, -1.0):
        threshold = AdaptiveThreshold(100, 0)
        threshold.observe(distance)
        assert threshold.num_observed == 0 and not threshold.accepts(distance)
        assert threshold.decide([distance, 0.5]).tolist() == [False, True]


@settings(deadline=None)
@given(_DISTANCES, st.integers(0, 30))
def test_a_step_is_observed_before_it_is_judged(distances: list[float], warmup: int) -> None:
    together, apart = AdaptiveThreshold(70, warmup), AdaptiveThreshold(70, warmup)
    singles = np.array(distances, dtype=np.float32).tolist()
    for distance in singles:
        apart.observe(distance)
    decided = together.decide(np.array(distances, dtype=np.float32))
    assert decided.tolist() == [apart.accepts(distance) for distance in singles]


@pytest.mark.parametrize("half_life", [None, 20.0])
def test_state_survives_a_round_trip_through_json(half_life: float | None) -> None:
    rng = np.random.default_rng(3)
    before = AdaptiveThreshold(80, 10, half_life)
    before.decide([*rng.lognormal(0, 1, 500).tolist(), 0.0, 1e-9, 1e9])
    state = json.loads(json.dumps(before.to_state()))
    after = AdaptiveThreshold(80, 10, half_life, state)
    assert (after.num_observed, after.is_warm) == (503, True)
    assert after.value == pytest.approx(before.value, rel=1e-12)
    for distance in rng.lognormal(1, 1, 50).tolist():
        before.observe(distance)
        after.observe(distance)
        assert after.value == pytest.approx(before.value, rel=1e-9)
    # The knobs are not part of the state.
    assert AdaptiveThreshold(20, 10, state=state).value < before.value
    assert AdaptiveThreshold(state=AdaptiveThreshold().to_state()).num_observed == 0


BAD_BINS = (
    *(None, 7, [7], [[5]], [[1, 1.0]] * 3000, [[-1, 1.0]], [[99999, 1.0]], [[5, 1.0, 1.0]], "55"),
    *([[True, 1.0]], [[5, 1.0], [5, 1.0]], [[5, 0.0]], [[5, math.nan]], [[5, math.inf]]),
    *([[5, "1"]], [[5, 10**400]]),
)
NO_BINS = r"bins must be at most 2563 pairs \[index, weight\]"
NO_NUMBER = "num_observed must be an integer of at least"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (7, "must be an object, got int"),
        ([], "must be an object, got list"),
        (None, "must have version 1, got None"),
        ({"version": 2}, "must have version 1, got 2"),
        ({"layout": [1e-7, 1e3, 128]}, "must have layout"),
        *(({"bins": bins}, NO_BINS) for bins in BAD_BINS),
        *(({"num_observed": number}, NO_NUMBER) for number in (2, "3", -1, 10**400)),
        ({"bins": []}, NO_NUMBER),
    ],
)
def test_bad_states_are_refused(changes: object, message: str) -> None:
    """``changes`` of a good one where it is an object; None: an empty one."""
    good = histogram_of([0.5, 0.5, 2.0]).to_state()
    state = {} if changes is None else good | changes if isinstance(changes, dict) else changes
    with pytest.raises(ValueError, match=message):
        AdaptiveThreshold(state=state)


def test_a_long_decayed_stream_stays_finite() -> None:
    """Weights are scaled down before they overflow; the percentile does not notice."""
    histogram = Histogram(half_life=1.0)
    for i in range(3000):
        histogram.observe(1.0 if i % 2 else 2.0)
    assert histogram.percentile(10) == pytest.approx(1.0, rel=0.01)
    assert Histogram(state=histogram.to_state()).num_observed == 3000


_KEY = CalibrationKey("model-a", 16, "corrected", "bfloat16")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the file; a running server saves at once."""
    monkeypatch.setattr(calibration, "_SAVE_INTERVAL_SECONDS", 0.0)
    return tmp_path / calibration.CALIBRATION_FILE


def state_of(num_distances: int) -> dict[str, object]:
    return histogram_of([0.1 + 0.01 * i for i in range(num_distances)]).to_state()


def _config(path: Path | None) -> ReasonCacheConfig:
    named = None if path is None else str(path)
    return ReasonCacheConfig(positions="corrected", warmup=4, calibration=named)


def _threshold(path: Path | None, model_path: Path) -> CalibratedThreshold:
    return CalibratedThreshold(_config(path), _KEY, str(model_path), True)


def _layers(changed: tuple[int, int] | None = None, rank: slice = slice(None)) -> torch.nn.Module:
    """Weights of all kinds; one number of the first may be changed. ``rank`` holds a part of it,
    by rows, and of the second, by columns."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(256, 256, generator=generator) for _ in range(2))
    if changed is not None:
        first[changed] += 1
    model = torch.nn.ParameterDict({"first": first[rank].bfloat16(), "second": second[:, rank]})
    model["scale"] = torch.nn.Parameter(torch.tensor(3.0))
    model["turned"] = torch.nn.Parameter(second.to(torch.float8_e4m3fn).T, requires_grad=False)
    model["none"] = torch.nn.Parameter(torch.empty(0, 4))
    return model


def test_a_fine_tune_has_another_key_and_so_has_another_scope() -> None:
    """Of the same shape. Its numbers behind the first ones are not looked at."""
    pool = SimpleNamespace(layer_num=2, head_num=2, head_dim=4, dtype=torch.bfloat16)
    parts: Any = SimpleNamespace(
        config=ReasonCacheConfig(), allocator=SimpleNamespace(get_kvcache=lambda: pool)
    )

    def key_of(model: torch.nn.Module) -> CalibrationKey:
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        shape = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3", vocab_size=9))
        common = SimpleNamespace(page_size=1)
        context = SimpleNamespace(model_config=shape, tp_worker=runner, tp_size=1, params=common)
        return ServerParts._calibration_key(parts, context, 8)  # type: ignore[arg-type]

    model = key_of(_layers())
    assert key_of(_layers()) == key_of(_layers(changed=(0, 64))) == model
    assert key_of(_layers(changed=(0, 63))) != model
    assert fingerprint(_layers(rank=slice(128))) == fingerprint(_layers())
    parts.config = ReasonCacheConfig(scope="prompt")
    assert key_of(_layers()) != model


def test_ranks_keep_the_first_ones_key_and_read_keys_alike() -> None:
    ranks: Any = SimpleNamespace(first=lambda _own: _KEY)
    assert agreed(ranks, _KEY._replace(model="of other weights")) == _KEY
    told = f"auto is as-cached on this .* rank, {_KEY.positions} on the first; corrected"
    with pytest.raises(ValueError, match=told):
        agreed(ranks, _KEY._replace(positions="as-cached"))


def test_states_are_kept_apart_by_every_part_of_the_key(path: Path) -> None:
    others = ("model-b", 8, "as-cached", "float16")
    changes = zip(_KEY._fields, others, strict=True)
    keys = [_KEY, *(_KEY._replace(**{name: value}) for name, value in changes)]  # type: ignore[arg-type]
    for count, key in enumerate(keys, start=1):
        assert load(path, key) is None
        save(path, key, state_of(count))
    for count, key in enumerate(keys, start=1):
        state = load(path, key)
        assert AdaptiveThreshold(state=state).num_observed == count
    save(path, _KEY, state_of(9))
    assert AdaptiveThreshold(state=load(path, _KEY)).num_observed == 9
    assert list(path.parent.iterdir()) == [path]


NO_FILES = (
    *(b"", b"{", b"\xff\xfe", b"[]", b"{}", b"[" * 100_000),
    *(b'{"version": 2, "entries": {}}', b'{"version": 1}', b'{"version": 1, "entries": []}'),
)


@pytest.mark.parametrize("content", NO_FILES)
def test_corrupt_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    """Also by a running server, which only logs it."""
    threshold = _threshold(path, path.parent)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"calibration file .*{path.name}"):
        load(path, _KEY)
    with pytest.raises(ValueError, match="calibration file"):
        save(path, _KEY, state_of(1))
    threshold.threshold.decide([0.1])
    threshold.maybe_save()
    assert threshold.is_saved()
    with pytest.raises(ValueError, match="--reasoncache-calibration"):
        calibration.check_calibration(_config(path))
    assert path.read_bytes() == content


def test_what_is_refused(path: Path) -> None:
    """A file too large, or none at all, a name too long, a folder that is not there."""
    with pytest.raises(ValueError, match="must be at most"):
        save(path, _KEY, {"padding": "x" * calibration.MAX_FILE_BYTES})
    assert not list(path.parent.iterdir())
    path.write_text(" " * (calibration.MAX_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="must be at most"):
        load(path, _KEY)
    pipe = path.parent / "pipe"
    os.mkfifo(pipe)
    for bad, message in (
        (path.parent / "absent" / "seen.json", "must lie in a writable folder"),
        *((named, "must be a regular file") for named in (pipe, path.parent)),
        *((path.parent / named, "File name too long") for named in ("x" * 300, "x" * 300 + "/y")),
    ):
        with pytest.raises(ValueError, match=f"--reasoncache-calibration '{bad}': .*{message}"):
            calibration.check_calibration(_config(bad))


@pytest.mark.parametrize(
    "entry",
    [
        7,
        *(
            state_of(1) | {"bins": [[5, weight]]}
            for weight in (math.nan, math.inf, -1.0, "1", 10**400)
        ),
        *(state_of(1) | {"num_observed": count} for count in (10**400, 2**63)),
    ],
)
def test_a_broken_entry_is_refused_where_the_file_was_given(
    path: Path, entry: object, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, whichever server's entry it is. A file that merely lies beside the model stops
    nobody."""
    path.write_text(json.dumps({"version": 1, "entries": {_KEY.as_text(): entry}}))
    found = f"{path}, entry .*model-a.*: histogram "
    with pytest.raises(ValueError, match=f"--reasoncache-calibration .*{found}"):
        calibration.check_calibration(_config(path))
    with pytest.raises(ValueError, match=f"--reasoncache-calibration: .*{found}"):
        _threshold(path, path.parent)
    assert not _threshold(None, path.parent).threshold.is_warm
    assert f"goes on without {path}" in caplog.text


def test_what_killed_writes_left_is_removed_at_the_start(path: Path) -> None:
    """Of an earlier start: another server may be writing now."""
    save(path, _KEY, state_of(1))
    begun = f"{calibration._PARTIAL}a", f"{calibration._PARTIAL}b"
    old, young = (path.parent / f"{name}{calibration._SUFFIX}" for name in begun)
    theirs = path.parent / f"{calibration._PARTIAL}env"
    for left in (old, young, theirs):
        left.touch()
    for left in (old, theirs):
        os.utime(left, (0, 0))
    calibration.check_calibration(_config(path))
    assert set(path.parent.iterdir()) == {path, young, theirs}


def test_oldest_entries_make_room(path: Path) -> None:
    keys = [_KEY._replace(model=f"model-{i}") for i in range(calibration.MAX_ENTRIES + 1)]
    for key in keys[:-1]:
        save(path, key, state_of(1))
    save(path, keys[0], state_of(2))  # now the newest
    save(path, keys[-1], state_of(3))
    assert load(path, keys[1]) is None
    assert load(path, keys[0]) == state_of(2)
    assert load(path, keys[-1]) == state_of(3)


def test_failed_write_leaves_the_old_file(path: Path) -> None:
    save(path, _KEY, state_of(1))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        save(path, _KEY, {"weight": float("nan")})
    assert path.read_bytes() == before
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            save(path, _KEY, state_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_restart_is_warm(path: Path) -> None:
    """What one server saw, the next one starts with. Without the flag a file in the model's
    folder is used and never written."""
    first = _threshold(path, path.parent)
    assert not first.threshold.is_warm
    first.threshold.decide([0.1, 0.2, 0.3, 0.4, 0.5])
    first.maybe_save()
    assert first.is_saved()
    written = path.read_bytes()
    reader = _threshold(None, path.parent)
    for second in (_threshold(path, path.parent / "none"), reader):
        assert second.threshold.is_warm
        assert second.threshold.value == pytest.approx(first.threshold.value)
    reader.threshold.decide([0.9] * 8)
    reader.maybe_save()
    assert reader.is_saved() and path.read_bytes() == written


def test_a_slow_disk_stalls_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are two writes under way at once."""
    threshold, goes_on, begun = _threshold(path, path.parent), threading.Event(), []

    def slow(*_args: object) -> None:
        begun.append(threading.current_thread())
        assert goes_on.wait(60)

    monkeypatch.setattr(calibration, "save", slow)
    for _ in range(3):
        threshold.threshold.decide([0.1])
        threshold.maybe_save()
    assert not threshold.is_saved(0.0)
    goes_on.set()
    assert threshold.is_saved() and len(begun) == 1
    threshold.maybe_save()
    assert threshold.is_saved() and len(begun) == 2


def test_without_a_thread_sharing_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next write is as if nothing had been."""
    threshold = _threshold(path, path.parent)
    threshold.threshold.decide([0.1])

    def none_left(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for _ in range(2):
            threshold.maybe_save()
            assert threshold.is_saved() and not path.exists()
    assert caplog.text.count("could not write --reasoncache-calibration") == 2
    threshold.maybe_save()
    assert threshold.is_saved() and load(path, _KEY) == threshold.threshold.to_state()
