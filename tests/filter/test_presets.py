# SPDX-License-Identifier: Apache-2.0
"""Every preset is what docs/filter.md says, and explicit values win over it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_reasoncache.config import ConfigError, ReasonCacheConfig
from sglang_reasoncache.filter.presets import PRESETS
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.filter.words import Words, filter_knobs

_DEFAULTS = ReasonCacheConfig().to_dict()
_MEMSHARE = {"length_factor": False, "use_structure": False, "align": "index"}

#: What each row of the papers' tables changes in ReasonCache.
_EXPECTED: dict[str, dict[str, Any]] = {
    "reasoncache": {},
    "memshare": _MEMSHARE | {"fixed_tau": 0.8},
    "memshare-0.9": _MEMSHARE | {"fixed_tau": 0.9},
    "cosine": {"use_structure": False, "percentile": 100.0, "warmup": 0},
    "cosine-structure": {"percentile": 100.0, "warmup": 0},
    "p20": {"percentile": 20.0},
    "p50": {"percentile": 50.0},
    "p80": {},
    "p100": {"percentile": 100.0, "warmup": 0},
    "fixed-0.8": {"fixed_tau": 0.8},
    "fixed-0.9": {"fixed_tau": 0.9},
    "sentence-bert": {"encoder": "sentence-bert"},
    "embedding": {"encoder": "embedding"},
    "cosine-distance": {"distance": "cosine"},
    "random": {"use_structure": False, "percentile": 100.0, "warmup": 0, "random_ratio": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", [*PRESETS, *_EXPECTED])
def test_a_preset_changes_what_its_row_says_and_explicit_values_win(name: str) -> None:
    resolved = ReasonCacheConfig.from_mapping({"preset": name}).to_dict()
    assert resolved.pop("preset") == name
    changed = {field: value for field, value in resolved.items() if value != _DEFAULTS[field]}
    assert changed == _EXPECTED[name]
    given = {"percentile": 33.0, "warmup": 7, "encoder": "tokens", "distance": "euclidean"}
    explicit = ReasonCacheConfig.from_mapping({"preset": name, **given}).to_dict()
    assert given.items() <= explicit.items()
    knobs = filter_knobs(name)
    config = FilterConfig(**knobs)
    assert {field: getattr(config, field) for field in knobs} == knobs
    fields = {field.name for field in dataclasses.fields(FilterConfig)}
    assert set(PRESETS[name]) - fields == set(PRESETS[name]) - set(knobs)


@pytest.mark.parametrize("preset", ["p30", "", None, 80, ["p20"]])
def test_an_unknown_preset_is_refused_with_the_names(preset: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasonCacheConfig.from_mapping({"preset": preset})
    assert "--reasoncache-preset must be one of " in str(caught.value)
    assert all(name in str(caught.value) for name in PRESETS)


def test_at_percentile_100_the_first_finite_distance_may_share() -> None:
    for name, row in PRESETS.items():
        config = ReasonCacheConfig.from_mapping({"preset": name})
        threshold = AdaptiveThreshold(config.percentile, config.warmup, config.half_life or None)
        decided = threshold.decide([5.0, float("nan")]).tolist()
        assert decided == [row["percentile"] == 100.0, False]


@pytest.mark.parametrize(
    ("preset", "text", "is_candidate"),
    [
        # Fixed 0.8 on the plain cosine: a step three times as long is still a candidate.
        ("memshare", "p q r s \n\n p q r s p q r s p q r s \n\n", True),
        ("fixed-0.8", "p q r s \n\n p q r s p q r s p q r s \n\n", False),
        ("reasoncache", "p q r s \n\n p q r s p q r s p q r s \n\n", False),
        # Five of six tokens in common: a cosine of 0.83.
        ("memshare", "a b c d e f \n\n a b c d e g \n\n", True),
        ("memshare-0.9", "a b c d e f \n\n a b c d e g \n\n", False),
    ],
)
def test_lexical_thresholds(preset: str, text: str, is_candidate: bool) -> None:
    words = Words()
    config = FilterConfig(block=2, **filter_knobs(preset))
    request = RequestFilter(config, words.classes, words.vocabulary, 0)
    request.push(words.encode(text))
    assert bool(request.counters.candidates) is is_candidate


def test_the_documents_table_lists_the_presets_in_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "filter.md").read_text(encoding="utf-8")
    section = text.partition("\n## Presets\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`([^`]+)`", row)] == list(PRESETS)
