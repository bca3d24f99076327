"""The sentences of a recommendation, from a document that is written here."""

from __future__ import annotations

import re
from typing import Any

from moereplay.analysis.recommendation import lines
from tests.kit.every import every

CONFIG = {"eviction": "lru", "prefetch": "none", "miss": "fetch", "scope": "global"}
GB = 10**9


def said_of(**more: Any) -> dict[str, Any]:
    """A document with only what sentences are made of."""
    best = {"config": CONFIG, "cache_bytes": 8 * GB - 28, "tokens_per_s": 40.0, "hit_rate": 0.5, "command": "moereplay"}
    best |= {"start": "used", "engines": []}
    here = {"memory_bytes": 10 * GB, "cache_bytes": 8 * GB - 28, "tokens_per_s": 40.0, "hit_rate": 0.5}
    near = here | {"cache_bytes": 8 * GB - 56}
    above = here | {"cache_bytes": 16 * GB, "tokens_per_s": 132.0}
    return {
        "trace": {"model": "m"},
        "platform": "p",
        "synthetic": None,
        "seconds": "estimated",
        "calibration": None,
        "memory": {"total_bytes": 10 * GB, "dense_bytes": GB, "kv_bytes": GB // 2, "runtime_bytes": GB // 2}
        | {"cache_bytes": 8 * GB},
        "best": best,
        "second": None,
        "from_empty": None,
        "best_known": None,
        "all_fit": False,
        "prefetch": {"pays": False, "gain": 0.0, "reason": "none"},
        "cpu": {"pays": None, "gain": 0.0, "reason": ""},
        "target_tokens_per_s": None,
        "smallest_memory_for_target": None,
        "lossy": [],
        "lossy_left_out": "",
        "searched": {"axes": {"eviction": ["lru"]}, "combinations": 1, "replayed": 1, "screened_on": None}
        | {"at_most": 9, "cut": False},
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
    assert text.count("3,084 experts of mean size, 65 of each layer") == 2


def test_a_peak_above_the_machines_memory_is_said_where_sets_are_ranked():
    memory = said_of()["memory"] | {"reserve_bytes": 2 * GB, "machine_bytes": 11 * GB, "peak_bytes": 12 * GB}
    point = said_of()["memory_curve"][1]
    points = [point | {"will_page": False}, point | {"will_page": True}]
    text = "\n".join(lines(said_of(memory=memory | {"will_page": True}, memory_curve=points)))
    assert "warning: peak: 12 GB with 2 GB for the system, but the machine has 11 GB" in text
    assert "(will page)" in text and "fits" in text
    fits = "\n".join(lines(said_of(memory=memory | {"will_page": False, "machine_bytes": 12 * GB})))
    assert "peak: 12 GB with 2 GB for the system, of 12 GB" in fits and "will page" not in fits


def test_warnings_stand_above_the_answer():
    shown = lines(said_of())
    (warning,) = [at for at, line in enumerate(shown) if line == "warning: beware of this"]
    (answer,) = [at for at, line in enumerate(shown) if line.startswith("use: ")]
    assert warning < answer


@every("gain", (0.0004, 0.02, 1.3, 12.0))
def test_what_a_lossy_set_costs_in_quality_is_never_passed_over(gain):
    lossy = {"change": {"miss": "fetch:bits=2"}, "tokens_per_s": 90.0, "gain": gain, "mass_share_kept": 1.0}
    lossy |= {"mass_share_low_precision": 0.0, "bits": 2, "stored_bits": 4}
    text = "\n".join(lines(said_of(lossy=[lossy])))
    assert "every expert at 2 bits instead of 4; what that costs in quality is not known here" in text
    assert re.search(r"\de[+-]\d", text) is None


def test_a_set_that_no_engine_has_is_marked_and_the_best_of_engines_stands_beside_it():
    known = {
        "config": CONFIG | {"miss": "cpu"},
        "tokens_per_s": 30.0,
        "hit_rate": 0.4,
        "engines": ["llama.cpp --n-cpu-moe"],
    }
    text = "\n".join(lines(said_of(best_known=known)))
    assert "engines: none known with this set; best supported set: llama.cpp --n-cpu-moe: 30 tokens/s (-25%)" in text
    best = said_of()["best"] | {"engines": ["preset imp"]}
    assert "engines that have this set: preset imp" in "\n".join(lines(said_of(best=best)))


def test_a_search_that_ended_early_says_so_and_does_not_answer_what_it_has_not_tried():
    searched = said_of()["searched"] | {"cut": True}
    text = "\n".join(lines(said_of(searched=searched, target_tokens_per_s=99.0)))
    assert "ended early, of at most 9: --budget none tries all" in text
    assert "not reached" not in text and "the search ended before this was known" in text


def test_a_search_that_ended_early_does_not_claim_that_prefetch_does_not_pay():
    unknown = {"pays": None, "gain": 0.0, "reason": "the search ended before it was known"}
    (line,) = [line for line in lines(said_of(prefetch=unknown)) if line.startswith("prefetch ")]
    assert "does not pay" not in line and "ended" in line


@every(
    "requests, low, answer, facts, not_said",
    (
        (1, None, "can't tell", ("20 times as fast", "one request, not tested"), "distinguished"),
        (5, None, "can't tell", ("20 times as fast", "not tested"), "one request"),
        (5, 30.0, "can't tell", ("statistically tied",), "not tested"),
        (5, 30.0, "yes", (), "times"),
    ),
)
def test_the_second_is_compared_only_as_far_as_it_was_tested(requests, low, answer, facts, not_said):
    interval = {
        "value": 40.0,
        "low": low,
        "high": low and 50.0,
        "requests": requests,
        "why": "" if low else "fewer than 6 requests",
    }
    best = said_of()["best"] | {"interval": interval}
    second = {"config": CONFIG | {"eviction": "arc"}, "differs": ["eviction"], "tokens_per_s": 2.0, "answer": answer}
    (line,) = [line for line in lines(said_of(best=best, second=second)) if line.startswith("second: ")]
    assert "eviction arc: 2 tokens/s" in line and not_said not in line
    assert all(fact in line for fact in facts)
