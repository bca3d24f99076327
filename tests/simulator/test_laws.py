"""Invariants of every replay under any policies, tested in small scenarios in which events coincide."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import assume, given
from hypothesis import strategies as st

from moereplay.policies.grammar import parse
from moereplay.results.counters import COUNTERS
from moereplay.results.result import Row
from tests.kit.cases import ListSource, Outcome, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.scenarios import DECLINING, EVICTIONS, Scenario, scenarios
from tests.kit.search import searched
from tests.policies.test_policy_pairs import REASONS, Recount, check_recount


def summed(rows: Iterable[Row]) -> Row:
    rows = list(rows)
    return {name: sum(row[name] for row in rows) for name in COUNTERS}


# ---------------------------------------------------------------- sums


@searched(100)
@given(scenarios())
def test_counters_of_a_replay_add_up(scenario: Scenario) -> None:
    outcome = scenario.replay()
    check_accesses(outcome)
    check_log(outcome, scenario)
    check_prefetches(outcome, scenario)
    assert outcome["time_ns"] == sum(outcome.counts("dense_ns", "expert_ns", "loading_ns", "stall_ns"))
    assert min(outcome.counts("stall_ns", "link_busy_ns")) >= 0
    totals = {name: outcome[name] for name in COUNTERS}
    assert summed(outcome.layers) == summed(outcome.requests) == totals
    assert outcome["evictions"] == sum(outcome.totals["lifetime"])
    assert outcome["mass"] == sum(outcome.counts("mass_kept", "mass_substituted", "mass_dropped"))
    parts = outcome.counts("mass_kept", "mass_low_precision", "mass_below_second", "mass_below_third")
    assert list(parts) == sorted(parts, reverse=True) and parts[-1] >= 0


def check_accesses(outcome: Outcome) -> None:
    """Every access hits, is late or misses, for one reason."""
    assert outcome["accesses"] == sum(outcome.counts("hits", "late", "misses"))
    assert outcome["misses"] == sum(outcome.counts(*REASONS))
    incomplete = outcome["steps"] - outcome["complete_steps"]
    assert bool(incomplete) == bool(outcome["misses"]) and incomplete <= outcome["misses"]


def check_log(outcome: Outcome, scenario: Scenario) -> None:
    """Gates find what the log moved, and no pool ever overflows; a reset clears without a line for each copy."""
    if any(event.kind == "reset" for event in outcome.events):
        return
    prefetch = parse("prefetch", scenario.settings["prefetch"])
    recount = Recount(scenario.pools, tiers_of(scenario), prefetch.policy.side_slots(prefetch.params))
    for event in outcome.events:
        recount.enter(event)
    check_recount(recount, outcome.totals)


def check_prefetches(outcome: Outcome, scenario: Scenario) -> None:
    """Every queued prefetch starts, is cancelled or dropped: the gate of the last layer cancels what is queued for it.

    An expert could be named once at every gate that reaches its layer: no policy that ships predicts farther.
    """
    ends = outcome.counts("prefetch_started", "prefetch_cancelled", "prefetch_dropped")
    assert outcome["prefetch_issued"] == sum(ends)
    assert outcome["prefetch_issued"] <= outcome["predicted"]
    assert outcome["prefetch_hits"] <= outcome["prefetch_used"] <= outcome["prefetch_started"]
    assert outcome["bytes_wasted"] + outcome["bytes_unused_at_end"] <= outcome["bytes_prefetch"]
    chosen = parse("prefetch", scenario.settings["prefetch"])
    reach = chosen.policy.names_ahead(chosen.params)
    for row in outcome.layers:
        assert row["predictable"] == row["accesses"] * min(row["layer"], reach)
        assert 0 <= row["predicted_demanded"] <= row["predictable"]


@searched(40)
@given(scenarios())
def test_a_replay_of_the_same_is_the_same_to_the_last_event(scenario: Scenario) -> None:
    assert scenario.replay() == scenario.replay()


def tiers_of(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    geometry, miss = scenario.source.geometry, parse("miss", scenario.settings["miss"])
    bits = miss.policy.bits(miss.params)
    return tuple(geometry.bytes_at(tier) for tier in bits) if bits else (geometry.expert_bytes,)


# ---------------------------------------------------------------- optimality and inclusion in the pure setting

#: By ids alone, and whatever comes in stays.
FORCED = [
    each for each in EVICTIONS if each not in DECLINING and not parse("eviction", each).needs & {"weights", "logits"}
]
ids = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def one_at_a_time(stream: list[int], layers: int) -> ListSource:
    """Single-expert steps: layer l of pass p demands stream[p * layers + l]."""
    rows = [[[e] for e in stream[at : at + layers]] for at in range(0, len(stream) - layers + 1, layers)]
    return ListSource(sizes(layers, 6, 1), [Prompted(tokens(*rows))])


def misses(source: ListSource, slots: int, eviction: str) -> int:
    """By one engine alone: they agree on evictions elsewhere."""
    return replay_lists(source, slots, machine(), log=False, engine="reference", eviction=eviction)["misses"]


@searched(60)
@given(ids, st.integers(1, 3), st.integers(1, 6))
def test_belady_misses_least_and_free_to_bypass_no_more(stream: list[int], layers: int, slots: int) -> None:
    assume(len(stream) >= layers)
    source = one_at_a_time(stream, layers)
    least = misses(source, slots, "belady")
    assert misses(source, slots, "belady:bypass=true") <= least
    fewer = [eviction for eviction in FORCED if misses(source, slots, eviction) < least]
    assert fewer == [], "evictions that miss less"


@every("contract", ["atomic", "sequential"])
@searched(100)
@given(st.lists(st.permutations(range(5)).map(lambda order: order[:2]), min_size=1, max_size=40), st.integers(2, 9))
def test_what_hits_in_a_small_lru_hits_in_a_larger_one(contract: str, demands: list[list[int]], slots: int) -> None:
    # two layers; a step's two experts always fit
    rows = [demands[at : at + 2] for at in range(0, len(demands) - 1, 2)] or [[demands[0], demands[0]]]
    source = ListSource(sizes(2, 5, 2), [Prompted(tokens(*rows))])
    small, large = (
        hits(replay_lists(source, each, machine(), engine="reference", contract=contract))
        for each in (slots, slots + 1)
    )
    assert small <= large


def hits(outcome: Outcome) -> set[tuple[int, int, int]]:
    return {(event.step_pass, event.layer, event.expert) for event in outcome.events if event.kind == "hits"}
