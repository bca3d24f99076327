"""Invariants of every replay under any policies, tested in small scenarios in which events coincide."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moereplay.policies.grammar import parse
from moereplay.results.counters import COUNTERS
from moereplay.results.result import Event, Row
from tests.kit.cases import ListSource, Outcome, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.scenarios import DECLINING, EVICTIONS, PREFETCHES, Scenario, scenarios

searched = settings(max_examples=100, deadline=None, derandomize=True)
REASONS = ("compulsory", "collisions", "capacity")


def summed(rows: Iterable[Row]) -> Row:
    rows = list(rows)
    return {name: sum(row[name] for row in rows) for name in COUNTERS}


# ---------------------------------------------------------------- sums


@settings(searched, max_examples=200)
@given(scenarios())
def test_counters_of_a_replay_add_up(scenario: Scenario) -> None:
    outcome = scenario.replay()
    check_accesses(outcome)
    check_prefetches(outcome, scenario)
    assert outcome["time_ns"] == sum(outcome.counts("dense_ns", "expert_ns", "loading_ns", "stall_ns"))
    assert min(outcome.counts("stall_ns", "link_busy_ns")) >= 0
    totals = {name: outcome[name] for name in COUNTERS}
    assert summed(outcome.layers) == summed(outcome.requests) == totals
    assert outcome["evictions"] == sum(outcome.totals["lifetime"])
    assert outcome["mass"] == sum(outcome.counts("mass_kept", "mass_substituted", "mass_dropped"))
    assert 0 <= outcome["mass_low_precision"] <= outcome["mass_kept"]


def check_accesses(outcome: Outcome) -> None:
    """Every access hits, is late or misses, for one reason."""
    assert outcome["accesses"] == sum(outcome.counts("hits", "late", "misses"))
    assert outcome["misses"] == sum(outcome.counts(*REASONS))


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


@settings(searched, max_examples=40)
@given(scenarios())
def test_a_replay_of_the_same_is_the_same_to_the_last_event(scenario: Scenario) -> None:
    assert scenario.replay() == scenario.replay()


# ---------------------------------------------------------------- the event log is complete

#: The streamed transfers of others look like those that stay.
LOGGED = [eviction for eviction in EVICTIONS if eviction not in DECLINING]
#: By ids alone, and whatever comes in stays.
FORCED = [eviction for eviction in LOGGED if not parse("eviction", eviction).needs & {"weights", "logits"}]
without_side_buffer = st.sampled_from(PREFETCHES)


class Residency:
    """The cache as the event log moves it: a copy is in flight until t1 of its transfer, then there until evicted."""

    def __init__(self, scenario: Scenario, tiers: tuple[tuple[int, ...], ...]) -> None:
        self._pools, self._tiers = scenario.pools, tiers
        self.arrives: dict[tuple[int, int, int], int] = {}
        self.bytes_moved = 0

    def follow(self, event: Event) -> None:
        copy = (event.layer, event.expert, event.precision)
        if event.kind == "transfer":
            assert copy not in self.arrives
            self.arrives[copy] = event.t1
            self.bytes_moved += self._size(copy)
            assert self._fits(event.layer)
        if event.kind == "evict":
            assert self.arrives.pop(copy) <= event.t0
        if event.kind == "hits":
            assert self.arrives[copy] <= event.t0
        if event.kind == "late":
            assert self.arrives[copy] > event.t0
        if event.kind in REASONS:
            assert copy not in self.arrives

    def _size(self, copy: tuple[int, int, int]) -> int:
        return self._tiers[copy[2]][copy[0]]

    def _fits(self, layer: int) -> bool:
        if len(self._pools) == 1:
            return sum(map(self._size, self.arrives)) <= self._pools[0]
        return sum(self._size(copy) for copy in self.arrives if copy[0] == layer) <= self._pools[layer]


def tiers_of(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    geometry, miss = scenario.source.geometry, parse("miss", scenario.settings["miss"])
    bits = miss.policy.bits(miss.params)
    return tuple(geometry.bytes_at(tier) for tier in bits) if bits else (geometry.expert_bytes,)


@searched
@given(scenarios(reset="never"), st.sampled_from(LOGGED), without_side_buffer)
def test_gates_find_what_the_log_moved_and_no_pool_ever_overflows(
    scenario: Scenario, eviction: str, prefetch: str
) -> None:
    scenario.settings.update(eviction=eviction, prefetch=prefetch, routing="standard")
    outcome, residency = scenario.replay(), Residency(scenario, tiers_of(scenario))
    for event in outcome.events:
        residency.follow(event)
    assert residency.bytes_moved == outcome["bytes_demand"] + outcome["bytes_prefetch"]
    landed = sum(t1 <= outcome["time_ns"] for t1 in residency.arrives.values())
    assert outcome["insertions"] - outcome["evictions"] == landed


# ---------------------------------------------------------------- optimality and inclusion in the pure setting

ids = st.lists(st.integers(0, 5), min_size=1, max_size=60)
pure = settings(max_examples=60, deadline=None, derandomize=True)


def one_at_a_time(stream: list[int], layers: int) -> ListSource:
    """Single-expert steps: layer l of pass p demands stream[p * layers + l]."""
    rows = [[[e] for e in stream[at : at + layers]] for at in range(0, len(stream) - layers + 1, layers)]
    return ListSource(sizes(layers, 6, 1), [Prompted(tokens(*rows))])


def misses(source: ListSource, slots: int, eviction: str) -> int:
    """By the reference alone: the engines agree on evictions elsewhere."""
    return replay_lists(source, slots, machine(), log=False, engine="reference", eviction=eviction)["misses"]


@pure
@given(ids, st.integers(1, 3), st.integers(1, 6))
def test_belady_misses_least_and_free_to_bypass_no_more(stream: list[int], layers: int, slots: int) -> None:
    assume(len(stream) >= layers)
    source = one_at_a_time(stream, layers)
    least = misses(source, slots, "belady")
    assert misses(source, slots, "belady:bypass=true") <= least
    fewer = [eviction for eviction in FORCED if misses(source, slots, eviction) < least]
    assert fewer == [], "evictions that miss less"


@every("contract", ["atomic", "sequential"])
@searched
@given(st.lists(st.permutations(range(5)).map(lambda order: order[:2]), min_size=1, max_size=40), st.integers(2, 9))
def test_what_hits_in_a_small_lru_hits_in_a_larger_one(contract: str, demands: list[list[int]], slots: int) -> None:
    # two layers; a step's two experts always fit
    rows = [demands[at : at + 2] for at in range(0, len(demands) - 1, 2)] or [[demands[0], demands[0]]]
    source = ListSource(sizes(2, 5, 2), [Prompted(tokens(*rows))])
    small, large = (hits(replay_lists(source, each, machine(), contract=contract)) for each in (slots, slots + 1))
    assert small <= large


def hits(outcome: Outcome) -> set[tuple[int, int, int]]:
    return {(event.step_pass, event.layer, event.expert) for event in outcome.events if event.kind == "hits"}
