# SPDX-License-Identifier: Apache-2.0
"""The calibration file: keyed, atomic, bounded, and honest about corruption."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from sglang_reasoncache.sharing import calibration
from sglang_reasoncache.sharing.calibration import CalibrationKey, load, save
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

_KEY = CalibrationKey("model-a", 16, "corrected", "bfloat16")


def state_of(num_distances: int) -> dict[str, object]:
    threshold = AdaptiveThreshold()
    threshold.decide([0.1 + 0.01 * i for i in range(num_distances)])
    return threshold.to_state()


def test_states_are_kept_apart_by_every_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    keys = [
        _KEY,
        CalibrationKey("model-b", 16, "corrected", "bfloat16"),
        CalibrationKey("model-a", 8, "corrected", "bfloat16"),
        CalibrationKey("model-a", 16, "as-cached", "bfloat16"),
        CalibrationKey("model-a", 16, "corrected", "float16"),
    ]
    for count, key in enumerate(keys, start=1):
        assert load(path, key) is None
        save(path, key, state_of(count))
    for count, key in enumerate(keys, start=1):
        state = load(path, key)
        assert AdaptiveThreshold.from_state(state).num_observed == count
    save(path, _KEY, state_of(9))
    assert AdaptiveThreshold.from_state(load(path, _KEY)).num_observed == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["calibration.json"]


def test_absent_file_gives_none(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json", _KEY) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"version": 2, "entries": {}}',
        b'{"version": 1}',
        b'{"version": 1, "entries": []}',
        b"[" * 100_000,
    ],
)
def test_corrupt_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"calibration file .*calibration\.json"):
        load(path, _KEY)
    with pytest.raises(ValueError, match="calibration file"):
        save(path, _KEY, state_of(1))
    assert path.read_bytes() == content


def test_entry_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"version": 1, "entries": {_KEY.as_text(): 7}}))
    with pytest.raises(ValueError, match="is not an object"):
        load(path, _KEY)


def test_file_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(ValueError, match="must be at most"):
        save(path, _KEY, {"padding": "x" * calibration.MAX_FILE_BYTES})
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b" " * (calibration.MAX_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="must be at most"):
        load(path, _KEY)


def test_oldest_entries_make_room(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    keys = [
        CalibrationKey(f"model-{i}", 16, "corrected", "bfloat16")
        for i in range(calibration.MAX_ENTRIES + 1)
    ]
    for key in keys[:-1]:
        save(path, key, state_of(1))
    save(path, keys[0], state_of(2))  # now the newest
    save(path, keys[-1], state_of(3))
    assert load(path, keys[1]) is None
    assert load(path, keys[0]) == state_of(2)
    assert load(path, keys[-1]) == state_of(3)


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
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
    assert [entry.name for entry in tmp_path.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("model", "block", "message"),
    [
        ("", 16, "calibration model must have 1 to 512 characters, got 0"),
        ("x" * 513, 16, "calibration model must have 1 to 512 characters, got 513"),
        ("m", 0, "calibration block must be at least 1, got 0"),
    ],
)
def test_bad_keys_are_refused(model: str, block: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalibrationKey(model, block, "corrected", "bfloat16")
