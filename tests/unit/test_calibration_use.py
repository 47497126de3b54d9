# SPDX-License-Identifier: Apache-2.0
"""A server's distance histogram is kept across restarts and checked before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.sharing import calibrated
from sglang_reasoncache.sharing.calibrated import CalibratedThreshold, check_calibration


def _factory(
    config: ReasonCacheConfig, model_path: Path, writes: bool = True
) -> CalibratedThreshold:
    return CalibratedThreshold(
        config,
        block=8,
        page_size=1,
        model_key="model",
        kv_dtype="bfloat16",
        model_path=str(model_path),
        writes=writes,
    )


def _config(path: Path | None) -> ReasonCacheConfig:
    return ReasonCacheConfig(
        positions="corrected", warmup=4, calibration=None if path is None else str(path)
    )


def test_restart_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one server saw, the next one starts with."""
    monkeypatch.setattr(calibrated, "_SAVE_INTERVAL_SECONDS", 0.0)
    config = _config(tmp_path / "seen.json")
    first = _factory(config, tmp_path)
    assert not first.threshold.is_warm
    first.threshold.decide([0.1, 0.2, 0.3, 0.4, 0.5])
    first.maybe_save()
    second = _factory(config, tmp_path)
    assert second.threshold.is_warm
    assert second.threshold.value == pytest.approx(first.threshold.value)


def test_calibration_beside_the_model_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the flag a file in the model's folder is used and never written."""
    monkeypatch.setattr(calibrated, "_SAVE_INTERVAL_SECONDS", 0.0)
    beside = tmp_path / calibrated.CALIBRATION_FILE
    writer = _factory(_config(beside), tmp_path)
    writer.threshold.decide([0.1] * 8)
    writer.maybe_save()
    written = beside.read_bytes()
    reader = _factory(_config(None), tmp_path)
    assert reader.threshold.is_warm
    reader.threshold.decide([0.9] * 8)
    reader.maybe_save()
    assert beside.read_bytes() == written


def test_spoilt_file_does_not_stop_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a start, and only logged while serving."""
    monkeypatch.setattr(calibrated, "_SAVE_INTERVAL_SECONDS", 0.0)
    path = tmp_path / "seen.json"
    factory = _factory(_config(path), tmp_path)
    path.write_text("{]")
    factory.threshold.decide([0.1])
    factory.maybe_save()
    assert path.read_text() == "{]"
    with pytest.raises(ValueError, match="--reasoncache-calibration"):
        check_calibration(_config(path))


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must lie in a writable folder"):
        check_calibration(_config(tmp_path / "absent" / "seen.json"))
