# SPDX-License-Identifier: Apache-2.0
"""Tests that each setting of the filter reaches the filter."""

import dataclasses
from typing import Any

import pytest

from sglang_reasoncache.config import ConfigError, ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.settings import FilterConfig

#: Field of the filter's settings -> the operator's setting, and a value that is not its default.
SETTINGS: dict[str, tuple[str, Any]] = {
    "block": ("block", 12),
    "strict": ("tau_strict", 0.95),
    "soft": ("tau_soft", 0.65),
    "fixed_tau": ("fixed_tau", 0.5),
    "length_factor": ("length_factor", False),
    "use_structure": ("use_structure", False),
    "structure_tolerance": ("structure_tolerance", 3),
    "match": ("match", "steps"),
    "direction": ("direction", "oldest"),
    "min_age": ("min_age", 77),
    "min_run": ("min_run", 21),
    "align": ("align", "index"),
    "max_step_tokens": ("max_step_tokens", 512),
    "max_history_steps": ("max_history_steps", 9),
    "random_ratio": ("random_ratio", 0.25),
    "reads_prompt": ("reads_prompt", True),
}
#: Fields that no setting changes.
CONSTANT = {"max_structure_checks", "max_candidates", "max_blocks_per_step", "limits"}


def test_every_field_is_accounted_for() -> None:
    fields = {field.name for field in dataclasses.fields(FilterConfig)}
    assert fields == SETTINGS.keys() | CONSTANT


@pytest.mark.parametrize("field", SETTINGS)
def test_a_setting_reaches_the_filter_alone(field: str) -> None:
    name, value = SETTINGS[field]
    plain = dataclasses.asdict(filter_config(ReasonCacheConfig()))
    changed = dataclasses.asdict(filter_config(ReasonCacheConfig(**{name: value})))
    assert changed == {**plain, field: value} != plain


def test_the_nearest_blocks_are_read_only_from_earlier_steps() -> None:
    values = {"match": "steps", "direction": "oldest", "align": "nearest"}
    assert filter_config(ReasonCacheConfig.from_mapping(values)).align == "nearest"
    memshare = ReasonCacheConfig.from_mapping({"preset": "memshare"})
    assert (memshare.align, memshare.percentile, memshare.warmup) == ("nearest", 100.0, 0)
    assert (memshare.fixed_tau, memshare.length_factor, memshare.use_structure) == (
        0.8,
        False,
        False,
    )
    for preset, value in (("memshare", "newest"), ("newest", "newest")):
        asked = {"preset": preset, "direction": value, "match": "steps", "align": "nearest"}
        with pytest.raises(ConfigError, match="align must be tokens or index unless direction=old"):
            ReasonCacheConfig.from_mapping(asked)
