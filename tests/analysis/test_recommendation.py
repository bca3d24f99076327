"""The sentences of a recommendation, from a document that is written here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from analysis.recommendation import lines

CONFIG = {"eviction": "lru", "prefetch": "none", "miss": "fetch", "scope": "global"}
GB = 10**9


def said_of(**more: Any) -> dict[str, Any]:
    """A document with only what sentences are made of."""
    best = {"config": CONFIG, "cache_bytes": 8 * GB - 28, "tokens_per_s": 40.0, "hit_rate": 0.5, "command": "moereplay"}
    here = {"memory_bytes": 10 * GB, "cache_bytes": 8 * GB - 28, "tokens_per_s": 40.0, "hit_rate": 0.5}
    near = here | {"cache_bytes": 8 * GB - 56}
    above = here | {"cache_bytes": 16 * GB, "tokens_per_s": 132.0}
    return {
        "trace": {"model": "m"},
        "platform": "p",
        "synthetic": None,
        "seconds": "estimate",
        "calibration": None,
        "memory": {"total_bytes": 10 * GB, "dense_bytes": GB, "kv_bytes": GB // 2, "runtime_bytes": GB // 2}
        | {"cache_bytes": 8 * GB},
        "best": best,
        "second": None,
        "all_fit": False,
        "prefetch": {"pays": False, "gain": 0.0, "reason": "none"},
        "cpu": {"pays": None, "gain": 0.0, "reason": ""},
        "target_tokens_per_s": None,
        "smallest_memory_for_target": None,
        "lossy": [],
        "lossy_left_out": "",
        "searched": {"axes": {"eviction": ["lru"]}, "combinations": 1, "replayed": 1, "screened_on": None},
        "memory_curve": [near, here, above],
        "flags": {"cache_mib": 7629, "slots": 3084, "slots_per_layer": 65, "unequal": True},
        "warnings": ["beware of this"],
        **more,
    }


def test_numbers_have_no_exponents_and_sizes_next_to_each_other_are_one():
    text = "\n".join(lines(said_of()))
    assert "8 GB more: +230% tokens/s" in text and "less:" not in text
    assert re.search(r"\de[+-]\d", text) is None


def test_one_count_of_experts_is_printed_everywhere():
    text = "\n".join(lines(said_of()))
    assert text.count("3,084 of mean size, 65 of each layer") == 2


def test_warnings_stand_above_the_answer():
    shown = lines(said_of())
    (warning,) = [at for at, line in enumerate(shown) if line == "warning: beware of this"]
    (answer,) = [at for at, line in enumerate(shown) if line.startswith("use: ")]
    assert warning < answer


@pytest.mark.parametrize("gain", (0.0004, 0.02, 1.3, 12.0))
def test_what_a_lossy_set_costs_in_quality_is_never_passed_over(gain):
    lossy = {"change": {"miss": "fetch:bits=2"}, "tokens_per_s": 90.0, "gain": gain, "mass_share_kept": 1.0}
    lossy |= {"mass_share_low_precision": 0.0, "bits": 2, "stored_bits": 4}
    text = "\n".join(lines(said_of(lossy=[lossy])))
    assert "every expert at 2 bits instead of 4; what that costs in quality is not known here" in text
    assert re.search(r"\de[+-]\d", text) is None
