"""The parts of a policy's misses add up, and say what would pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given

from moereplay.analysis.gap import Gap, flat, gap_of, sentences
from moereplay.simulator.config import configure
from moereplay.simulator.limits.limits import limits
from moereplay.simulator.replay import replay
from tests.kit.policy_runs import trace_of
from tests.kit.search import searched
from tests.simulator.test_limits import Case, cases

#: Requests of every layer, step by step, of the conformance trace of arXiv 2608.07911.
STEPS = ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1])


@pytest.mark.slow
def test_the_published_trace_has_twelve_compulsory_misses_and_six_for_lack_of_capacity() -> None:
    """Three layers of four experts, two in each pool, LRU: 30 accesses, 12 hits, 12 + 6 misses.

    Expert 0 stays; of 1, 2 and 3 each takes the place of the one before: 1 misses at its second and third step, in each
    layer. Whatever is evicted, 1 may be kept only instead of 0, or of 2 and 3, if those need not be admitted.
    """
    trace = trace_of([[ids] * 3 for ids in STEPS], experts=4)
    config = configure(capacity="2/layer", scope="per_layer", eviction="lru")
    found, totals = limits(trace, config), replay(trace, config).totals
    assert (found.accesses, totals["hits"], totals["misses"]) == (30, 12, 18)
    assert (found.compulsory, found.relaxed, found.forced) == (12, 12, 18)
    gap = gap_of(totals["misses"], 12, 12, 18)
    assert gap == Gap(compulsory=12, capacity=0, admission=6, victim=0)
    assert gap.admission_share == 1.0
    assert found.fixed == (24, 18)  # 0 and 1 of each layer: 5 + 3 accesses, one each of which loads it


@searched(60)
@given(cases(evictions=("lru", "lfu", "random", "arc", "least_stale", "belady", "static"), prefetches=("none",)))
def test_parts_are_never_negative_and_add_up(case: Case) -> None:
    config = case.config
    found, misses = limits(case.trace, config), replay(case.trace, config, engine="reference").totals["misses"]
    assert found.compulsory is not None and found.relaxed is not None and found.forced is not None
    gap = gap_of(misses, found.compulsory, found.relaxed, None if config.eviction == "static" else found.forced)
    assert gap.compulsory + gap.beyond == misses
    assert min(gap.compulsory, gap.capacity, gap.admission or 0, gap.victim) >= 0
    assert gap.admission_share is None or 0 <= gap.admission_share <= 1


def document(**limit: Any) -> dict[str, Any]:
    """Of lru, which misses 100 times, and of `static`, which may reject and misses 90 times."""
    known = {"compulsory": 10, "relaxed": 40, "forced": 50, "fixed_preloaded": 5, "fixed_loaded_once": 3}
    complete = dict.fromkeys(("complete_steps_reached", "complete_steps", "steps"))
    lru, static = gap_of(100, 10, 40, 50), gap_of(90, 10, 40, None)
    policy = {"time_ns": 400, "tokens_per_s": 2.0, "complete_steps": 7}
    return {
        "config": {"capacity": "5%"},
        "accesses": 200,
        "limits": known | complete | {"routed": None, "time_ns": 100, "tokens_per_s": 8.0} | limit,
        "policies": [
            {"eviction": "lru", "misses": 100, "gap": asdict(lru), **policy},
            {"eviction": "static", "misses": 90, "gap": asdict(static), **policy},
        ],
    }


def test_sentences_name_the_parts_and_what_would_pay() -> None:
    lru, static, advice = sentences(document())
    assert lru == "lru: 90 misses beyond the compulsory ones, 33.3% lack of capacity, 11.1% admission, 55.6% victims"
    assert static.endswith("37.5% lack of capacity, 62.5% admission and victims")
    assert all(fact in advice for fact in ("after static", "victim", "(50 misses)", "at most 4 times as fast"))
    routed = {"freedom": "any of the best 4", "at_least": 7, "at_most": 9}
    assert sentences(document(routed=routed))[-1].endswith("90 to 9 misses, never below 7")


def test_what_is_not_known_is_said_of_nobody() -> None:
    without = document(relaxed=None, forced=None, fixed_preloaded=None, fixed_loaded_once=None, time_ns=None)
    for policy in without["policies"]:
        policy["gap"] = None
    assert sentences(without) == []
    rows = {row["what"]: row for row in flat([without])}
    assert rows["relaxed belady"]["misses"] is None and rows["lru"]["victim_misses"] is None
    assert rows["lru"]["hit_rate"] == 0.5 and rows["lru"]["capacity"] == "5%"
