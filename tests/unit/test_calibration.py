# SPDX-License-Identifier: Apache-2.0
"""The calibration file: keyed, atomic, bounded, honest about corruption, kept across restarts."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.sharing import calibration
from sglang_reasoncache.sharing.calibration import (
    CalibratedThreshold,
    CalibrationKey,
    check_calibration,
    load,
    save,
)
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

_KEY = CalibrationKey("model-a", 16, "corrected", "bfloat16")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the file; a running server saves at once."""
    monkeypatch.setattr(calibration, "_SAVE_INTERVAL_SECONDS", 0.0)
    return tmp_path / calibration.CALIBRATION_FILE


def state_of(num_distances: int) -> dict[str, object]:
    threshold = AdaptiveThreshold()
    threshold.decide([0.1 + 0.01 * i for i in range(num_distances)])
    return threshold.to_state()


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
    threshold = _threshold(_config(path), path.parent)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"calibration file .*{path.name}"):
        load(path, _KEY)
    with pytest.raises(ValueError, match="calibration file"):
        save(path, _KEY, state_of(1))
    threshold.threshold.decide([0.1])
    threshold.maybe_save()
    with pytest.raises(ValueError, match="--reasoncache-calibration"):
        check_calibration(_config(path))
    assert path.read_bytes() == content


def test_what_is_refused(path: Path) -> None:
    """A file too large, an entry that is no object, a folder that is not there."""
    with pytest.raises(ValueError, match="must be at most"):
        save(path, _KEY, {"padding": "x" * calibration.MAX_FILE_BYTES})
    assert not list(path.parent.iterdir())
    for content, message in (
        (json.dumps({"version": 1, "entries": {_KEY.as_text(): 7}}), "is not an object"),
        (" " * (calibration.MAX_FILE_BYTES + 1), "must be at most"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load(path, _KEY)
    with pytest.raises(ValueError, match="must lie in a writable folder"):
        check_calibration(_config(path.parent / "absent" / "seen.json"))


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
    with pytest.raises(ValueError, match="JSON"):
        save(path, _KEY, {"weight": float("nan")})
    assert load(path, _KEY) == state_of(1)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            save(path, _KEY, state_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def _threshold(config: ReasonCacheConfig, model_path: Path) -> CalibratedThreshold:
    return CalibratedThreshold(config, _KEY, str(model_path), True)


def _config(path: Path | None) -> ReasonCacheConfig:
    return ReasonCacheConfig(
        positions="corrected", warmup=4, calibration=None if path is None else str(path)
    )


def test_restart_is_warm(path: Path) -> None:
    """What one server saw, the next one starts with. Without the flag a file in the model's
    folder is used and never written."""
    first = _threshold(_config(path), path.parent)
    assert not first.threshold.is_warm
    first.threshold.decide([0.1, 0.2, 0.3, 0.4, 0.5])
    first.maybe_save()
    written = path.read_bytes()
    elsewhere = _threshold(_config(path), path.parent / "none")
    reader = _threshold(_config(None), path.parent)
    for second in (elsewhere, reader):
        assert second.threshold.is_warm
        assert second.threshold.value == pytest.approx(first.threshold.value)
    reader.threshold.decide([0.9] * 8)
    reader.maybe_save()
    assert path.read_bytes() == written
