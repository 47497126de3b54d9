# SPDX-License-Identifier: Apache-2.0
"""A JSON file that keeps the observed distances across restarts, one state per key.

Without it, the first requests of a fresh server meet an empty percentile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.sharing.histogram import Histogram
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

logger = logging.getLogger(__name__)

#: Read from the model's folder when ``--reasoncache-calibration`` is not given.
CALIBRATION_FILE = "reasoncache_calibration.json"
_SAVE_INTERVAL_SECONDS = 30.0
_VERSION = 1
#: Ends of the names of files that are being written, and their age when no writer is left.
_PARTIAL, _SUFFIX, _ABANDONED_SECONDS = ".reasoncache-", ".partial", 60.0
MAX_FILE_BYTES = 4 << 20
"""A file above this size is neither read nor written."""
MAX_ENTRIES = 32
"""Saving one more key removes the one that was saved the longest ago."""


class CalibrationKey(NamedTuple):
    """What distances depend on.

    Attributes:
        model: Shape and weights of the model, and how blocks are paired.
        block: Tokens per block.
        positions: ``corrected`` or ``as-cached``.
        kv_dtype: Such as ``bfloat16``.
    """

    model: str
    block: int
    positions: str
    kv_dtype: str

    def as_text(self) -> str:
        """The key in the file."""
        return json.dumps(self)


def load(path: Path, key: CalibrationKey) -> dict[str, object] | None:
    """The state saved for ``key``; None if the file or the key is absent.

    Raises ValueError for a file that is too large or no calibration, or a broken entry, OSError if
    it cannot be read.
    """
    state: Any = _read(path).get(key.as_text())
    if state is not None:
        _check_entry(path, key.as_text(), state)
    return state  # type: ignore[no-any-return]


def save(path: Path, key: CalibrationKey, state: dict[str, object]) -> None:
    """Set the state of ``key`` and keep the other entries; replaces the file in one move.

    Of two writers at once, the later one may remove the entry of the other.

    Raises:
        ValueError: the present file is not a calibration file (it is left alone), or the new
            one would be too large.
        OSError: the directory cannot be written.
    """
    entries = _read(path)
    entries.pop(key.as_text(), None)
    entries[key.as_text()] = state
    while len(entries) > MAX_ENTRIES:
        del entries[next(iter(entries))]
    data = json.dumps({"version": _VERSION, "entries": entries}, allow_nan=False).encode()
    _check_size(path, data)
    _replace(path, data)


def _check_entry(path: Path, key: str, state: object) -> None:
    try:
        Histogram(state=state)
    except ValueError as error:
        raise ValueError(f"calibration file {path}, entry {key:.200}: {error}") from error


def _check_size(path: Path, data: bytes) -> None:
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"calibration file {path} must be at most {MAX_FILE_BYTES} bytes")


def _read(path: Path) -> dict[str, object]:
    """Entries of the file, oldest first; empty if there is no file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    _check_size(path, data)
    try:
        content = json.loads(data)
    # RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"calibration file {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ValueError(f"calibration file {path} must have version {_VERSION}")
    entries = content.get("entries")
    if not isinstance(entries, dict):
        raise ValueError(f"calibration file {path} has no entries")
    return entries


def _replace(target: Path, data: bytes) -> None:
    """No reader ever sees half a file."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_PARTIAL, suffix=_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


class CalibratedThreshold:
    """The distance threshold of a scheduler, kept in a file across restarts.

    Args:
        model_path: Folder of the weights, searched for a calibration.
        writes: Whether this process writes the calibration (one rank does).
        agree: Called with the stored histogram of this rank; returns the one all ranks use.
    """

    def __init__(
        self,
        config: ReasonCacheConfig,
        key: CalibrationKey,
        model_path: str,
        writes: bool,
        agree: Callable[[Any], Any] = lambda state: state,
    ) -> None:
        self._config, self._key, self._writes = config, key, writes
        self._path = Path(config.calibration) if config.calibration else None
        self._saved_at = time.monotonic()
        self._saved_observations = 0
        self._saving: threading.Thread | None = None
        beside_model = Path(model_path) / CALIBRATION_FILE
        state = agree(self._stored(beside_model) if config.shares else None)
        half_life = config.half_life or None
        self.threshold = AdaptiveThreshold(config.percentile, config.warmup, half_life, state)

    def _stored(self, beside_model: Path) -> dict[str, object] | None:
        """From the operator's file or the model's folder. Raises ValueError where the operator's
        is broken; of the other one nobody asked for the log tells it."""
        for path in (self._path, beside_model):
            try:
                if path is None or not path.is_file():
                    continue
                stored = load(path, self._key)
            except (ValueError, OSError) as error:
                if path is self._path:
                    raise ValueError(f"{flag_of('calibration')}: {error}") from error
                logger.warning("reasoncache: goes on without %s: %s", path, error)
                continue
            if stored is not None:
                logger.info("reasoncache: distances calibrated from %s", path)
                return stored
            logger.warning("reasoncache: %s holds no distances for %s", path, self._key)
        if self._config.warmup:
            told = "reasoncache: no calibration, nothing is shared before %d distances were seen"
            logger.info(told, self._config.warmup)
        return None

    def maybe_save(self) -> None:
        """Write the calibration now and then, in a thread of its own: a slow disk stalls no request."""
        now = time.monotonic()
        if self._path is None or not self._writes or now - self._saved_at < _SAVE_INTERVAL_SECONDS:
            return
        self._saved_at = now
        if self.threshold.num_observed <= self._saved_observations:
            return
        if not self.is_saved(0.0):
            told = "reasoncache: %s %s is still being written"
            logger.warning(told, flag_of("calibration"), self._path)
            return
        # A daemon: a server that ends does not wait for its disk.
        args = self._path, self.threshold.to_state()
        saving = threading.Thread(target=self._save, args=args, daemon=True)
        try:
            saving.start()
        except RuntimeError:
            # No thread is to be had now; the next interval tries again.
            self._could_not_write(self._path)
            return
        self._saving, self._saved_observations = saving, self.threshold.num_observed

    def _save(self, path: Path, state: dict[str, object]) -> None:
        try:
            save(path, self._key, state)
        except Exception:
            # A full disk, or a file corrupted meanwhile, must not stop the server.
            self._could_not_write(path)

    def _could_not_write(self, path: Path) -> None:
        logger.exception("reasoncache: could not write %s %s", flag_of("calibration"), path)

    def is_saved(self, timeout: float | None = None) -> bool:
        """Whether nothing is being written, within so many seconds (None: waits until then)."""
        if self._saving is None:
            return True
        self._saving.join(timeout)
        return not self._saving.is_alive()

    def describe(self) -> dict[str, Any]:
        value = self.threshold.value
        return {
            "key": self._key.as_text(),
            "percentile": self._config.percentile,
            "observations": self.threshold.num_observed,
            "warm": self.threshold.is_warm,
            # JSON has no infinity; None is "whatever stage 1 lets through".
            "distance": value if math.isfinite(value) else None,
        }


def check_calibration(config: ReasonCacheConfig) -> None:
    """Raises ValueError for a file that is no calibration, or a folder that cannot be written.
    Removes what killed writes left in that folder."""
    if config.calibration is None:
        return
    path = Path(config.calibration)
    try:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError("must lie in a writable folder")
        if path.exists() and not path.is_file():
            raise ValueError("must be a regular file")
        for key, state in _read(path).items():
            _check_entry(path, key, state)
        for left in path.parent.glob(f"{_PARTIAL}*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    left.unlink()
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag_of('calibration')} {config.calibration!r}: {error}") from error
