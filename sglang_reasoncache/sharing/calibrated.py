# SPDX-License-Identifier: Apache-2.0
"""The distance threshold of a server, kept in a file across restarts."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.align import AlignMode
from sglang_reasoncache.filter.encoder import EncoderChoice
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.sharing import calibration
from sglang_reasoncache.sharing.calibration import CalibrationKey
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

logger = logging.getLogger(__name__)

#: Read from the model's folder when ``--reasoncache-calibration`` is not given.
CALIBRATION_FILE = "reasoncache_calibration.json"
_SAVE_INTERVAL_SECONDS = 30.0


class CalibratedThreshold:
    """One per scheduler.

    Args:
        config: Resolved settings.
        block: Tokens per block, the page size when that is above 1.
        page_size: Resolved page size.
        model_key: What distances depend on besides ours; see ``plugin.assembly``.
        kv_dtype: Name of the pool's dtype.
        model_path: Folder of the weights, looked at for a calibration.
        writes: Whether this process writes the calibration (one rank does).
        agree: Called with the stored histogram this rank found; returns the one
            all ranks use.
    """

    def __init__(
        self,
        config: ReasonCacheConfig,
        block: int,
        page_size: int,
        model_key: str,
        kv_dtype: str,
        model_path: str,
        writes: bool,
        agree: Callable[[Any], Any] = lambda state: state,
    ) -> None:
        self._config = config
        self._key = CalibrationKey(
            model=f"{model_key}/page{page_size}/{config.align}",
            block=block,
            positions=_comparison(config),
            kv_dtype=kv_dtype,
        )
        self._path = Path(config.calibration) if config.calibration else None
        self._writes = writes
        self._saved_at = time.monotonic()
        self._saved_observations = 0
        stored = agree(self._stored(Path(model_path) / CALIBRATION_FILE))
        half_life = config.half_life or None
        self.threshold = AdaptiveThreshold(config.percentile, config.warmup, half_life)
        if stored is not None:
            self.threshold = AdaptiveThreshold.from_state(
                stored, config.percentile, config.warmup, half_life
            )

    def _stored(self, beside_model: Path) -> dict[str, object] | None:
        """The histogram of an earlier run, from the operator's file or the model's folder."""
        for path in (self._path, beside_model):
            if path is None or not path.is_file():
                continue
            stored = calibration.load(path, self._key)
            if stored is not None:
                logger.info("reasoncache: distances calibrated from %s", path)
                return stored
            logger.warning("reasoncache: %s holds no distances for %s", path, self._key)
        logger.info(
            "reasoncache: no calibration, nothing is shared before %d distances were seen",
            self._config.warmup,
        )
        return None

    def maybe_save(self) -> None:
        """Write the calibration now and then; called after each decode step, so it must be cheap."""
        if (
            self._path is None
            or not self._writes
            or time.monotonic() - self._saved_at < _SAVE_INTERVAL_SECONDS
        ):
            return
        self._saved_at = time.monotonic()
        if self.threshold.num_observed > self._saved_observations:
            self._saved_observations = self.threshold.num_observed
            try:
                calibration.save(self._path, self._key, self.threshold.to_state())
            except (OSError, ValueError):
                # A full disk, or a file somebody spoilt meanwhile, must not stop the
                # server; the next interval tries again.
                logger.exception(
                    "reasoncache: could not write --reasoncache-calibration %s", self._path
                )

    def describe(self) -> dict[str, Any]:
        return {
            "key": self._key.as_text(),
            "percentile": self._config.percentile,
            "observations": self.threshold.num_observed,
            "warm": self.threshold.is_warm,
            # JSON has no infinity; None is "whatever stage 1 lets through".
            "distance": self.threshold.value if math.isfinite(self.threshold.value) else None,
        }


def _comparison(config: ReasonCacheConfig) -> str:
    """How keys are stored and compared; distances of different kinds do not mix."""
    if config.distance == "euclidean":
        return config.positions
    return f"{config.positions}/{config.distance}"


def check_calibration(config: ReasonCacheConfig) -> None:
    """Refuse ``--reasoncache-calibration`` before a server starts on it.

    Raises:
        ValueError: not a calibration file, or a place that cannot be written.
    """
    if config.calibration is None:
        return
    path = Path(config.calibration)
    flag = "--reasoncache-calibration"
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} must lie in a writable folder, got {config.calibration!r}")
    if path.exists():
        try:
            calibration.load(path, CalibrationKey("any", 1, config.positions, "any"))
        except (ValueError, OSError) as error:
            raise ValueError(f"{flag} {config.calibration!r}: {error}") from error


def filter_config(config: ReasonCacheConfig, block: int, page_size: int) -> FilterConfig:
    """The filter's knobs out of the operator's settings.

    Raises:
        ValueError: a value out of its bound, or a structure tolerance above 0
            without the package that computes edit distances.
    """
    try:
        return FilterConfig(
            strict=config.tau_strict,
            soft=config.tau_soft,
            fixed_tau=config.fixed_tau,
            length_factor=config.length_factor,
            use_structure=config.use_structure,
            structure_tolerance=config.structure_tolerance,
            block=block,
            page_size=page_size,
            align=cast(AlignMode, config.align),  # the config allows no other value
            max_step_tokens=config.max_step_tokens,
            max_history_steps=config.max_history_steps,
            random_ratio=config.random_ratio,
            encoder=EncoderChoice.parse(config.encoder).kind,
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from error
