"""Tiers between the fast and the slow one: worked examples in nanoseconds, a slow obvious cache, and platform files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.analysis.ranking import ranking
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import of_platform
from moereplay.simulator.platform import LowerTier
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.replay import ENGINES, replay
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.cases import Cell, ListSource, Prompted, at_rate, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every


def dram(experts: int, bytes_per_ns: float = 0.5, latency_ns: int = 0, depth: int = 1) -> LowerTier:
    """A tier of so many experts of one byte."""
    rate = bytes_per_ns * 1e9
    tier = LowerTier(name="DRAM", capacity=f"{experts}B", bytes_per_s=1, latency_ns=latency_ns, depth=depth)
    return at_rate(tier, rate)


class TestByHand:
    """Experts of one byte; 1 ns over the link into the fast tier, 2 ns over the one into DRAM. Both engines."""

    def test_an_expert_crosses_one_link_after_the_other(self) -> None:
        # the gate is at 1. Expert 0 comes into DRAM at 3 and into the fast tier at 4; expert 1 at 5 and 6
        where = machine(dense_ns=1, expert_ns=3, tiers=[dram(4)])
        outcome = replay_lists(ListSource(sizes(1, 4, 2), [Prompted(tokens([[0, 1]]))]), 2, where)
        assert outcome.spans("fill") == [(1, 3, 0, 0), (3, 5, 0, 1)]
        assert outcome.spans("transfer") == [(3, 4, 0, 0), (5, 6, 0, 1)]
        assert outcome.spans("expert") == [(4, 7, 0, 0), (7, 10, 0, 1)]
        assert outcome.counts("bytes_demand", "bytes_lower", "link_busy_ns", "stall_ns") == (2, 2, 6, 3)

    def test_what_dram_holds_does_not_come_from_below_again(self) -> None:
        # a fast tier of one expert; 0, 1, 0: the third token finds 0 in DRAM and waits for 1 ns
        where = machine(dense_ns=1, tiers=[dram(2)])
        outcome = replay_lists(ListSource(sizes(1, 4, 1), [Prompted(tokens([[0]], [[1]], [[0]]))]), 1, where)
        assert outcome.spans("fill") == [(1, 3, 0, 0), (5, 7, 0, 1)]
        assert outcome.spans("transfer") == [(3, 4, 0, 0), (7, 8, 0, 1), (9, 10, 0, 0)]
        assert outcome.counts("misses", "bytes_demand", "bytes_lower") == (3, 3, 2)

    def test_dram_evicts_what_was_read_longest_ago(self) -> None:
        # DRAM of two, a fast tier of one: 0 1 0 2 0 1. 2 takes the place of 1, since 0 was read after 1
        where = machine(tiers=[dram(2)])
        demand = tokens(*([[e]] for e in (0, 1, 0, 2, 0, 1)))
        outcome = replay_lists(ListSource(sizes(1, 4, 1), [Prompted(demand)]), 1, where)
        assert [expert for *_, expert in outcome.spans("fill")] == [0, 1, 2, 1]

    def test_a_hit_in_the_fast_tier_is_no_read_of_dram(self) -> None:
        # a fast tier of two: 0 1 0 0 2 gives 2 the place of 0 in DRAM, which was read once, before 1
        where = machine(tiers=[dram(2)])
        demand = tokens(*([[e]] for e in (0, 1, 0, 0, 2)), [[1]], [[0]])
        outcome = replay_lists(ListSource(sizes(1, 4, 1), [Prompted(demand)]), 2, where)
        # the fast tier holds 0, 2 after the fifth token; 1 is in DRAM, and 0 is read from below when it comes back
        assert [expert for *_, expert in outcome.spans("fill")] == [0, 1, 2, 0]
        assert [expert for *_, expert in outcome.spans("transfer")] == [0, 1, 2, 1, 0]

    def test_what_waits_to_be_read_is_not_evicted(self) -> None:
        # DRAM of one. Expert 0 is there at 3 and crosses the slow link up until 23; only then may 1 take its place
        where = machine(bytes_per_ns=0.05, dense_ns=1, tiers=[dram(1)])
        outcome = replay_lists(ListSource(sizes(1, 4, 2), [Prompted(tokens([[0, 1]]))]), 2, where)
        assert outcome.spans("fill") == [(1, 3, 0, 0), (23, 25, 0, 1)]
        assert outcome.spans("transfer") == [(3, 23, 0, 0), (25, 45, 0, 1)]

    @every("levels, ran", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 0, 3, 4, 3])])
    def test_routing_sees_what_dram_holds(self, levels: int, ran: list[int]) -> None:
        # one expert in the fast tier, two in DRAM. The third token takes its second, 0, from there; 3 replaces 1, so
        # the fifth, of 4 and 1, runs 4, which replaces 0; the last takes 3
        pairs = [(0, 5), (1, 5), (2, 0), (3, 5), (4, 1), (5, 3)]
        scores = [[2.0 * (e == best) + 1.0 * (e == second) for e in range(6)] for best, second in pairs]
        demand = [[Cell([best], logits=row)] for (best, _), row in zip(pairs, scores, strict=True)]
        source, routing = ListSource(sizes(1, 6, 1), [Prompted(demand)]), f"max_rank:m=2:top_j=0:levels={levels}"
        replay_lists(source, 1, machine(tiers=[dram(2)]), routing=routing)
        assert [step[0][0] for step in source.executed] == ran

    def test_a_demand_goes_on_with_the_prefetch_that_it_overtakes(self) -> None:
        # layer 0 routes nobody and its gate at 1 names (1, 2), which is under way into DRAM until 21. The gate of
        # layer 1 at 2 cancels the prefetch, and its demand need not begin again: into the fast tier at 21, there at 22
        token = [Cell([-1], look=[naming(4, [2])]), Cell([2])]
        where = machine(dense_ns=1, expert_ns=2, tiers=[dram(4, bytes_per_ns=0.05)])
        outcome = replay_lists(ListSource(sizes(2, 4, 1), [Prompted([token])]), 4, where, prefetch="top_k")
        assert outcome.spans("fill") == [(1, 21, 1, 2)]
        assert outcome.spans("transfer", "demand") == [(21, 22, 1, 2)]
        assert outcome.counts("misses", "prefetch_cancelled", "prefetch_started", "time_ns") == (1, 1, 0, 24)

    def test_a_prefetch_that_is_overtaken_and_not_demanded_stays_in_dram(self) -> None:
        # as above, but layer 1 demands 0. The next token demands 2 of layer 1 and finds it in DRAM
        first = [Cell([-1], look=[naming(4, [2])]), Cell([0])]
        second = [Cell([-1], look=[naming(4, [0])]), Cell([2])]
        where = machine(dense_ns=1, tiers=[dram(4)])
        outcome = replay_lists(ListSource(sizes(2, 4, 1), [Prompted([first, second])]), 4, where, prefetch="top_k")
        # fills: (1, 2) at 1 to 3, then the demand of (1, 0) from 3 to 5
        assert outcome.spans("fill") == [(1, 3, 1, 2), (3, 5, 1, 0)]
        assert outcome.spans("transfer") == [(5, 6, 1, 0), (8, 9, 1, 2)]

    def test_a_reset_empties_every_tier(self) -> None:
        where = machine(dense_ns=1, tiers=[dram(4)])
        source = ListSource(sizes(1, 4, 1), [Prompted(tokens([[0]])), Prompted(tokens([[0]]))])
        assert replay_lists(source, 4, where, reset="request")["bytes_lower"] == 2
        assert replay_lists(source, 4, where, reset="never")["bytes_lower"] == 1

    def test_what_is_warm_beyond_the_fast_tier_lies_in_dram_and_the_first_listed_stays_longest(self) -> None:
        # a fast tier of one and DRAM of two, warm: 0; 1, 2. Demand 1, 3, 2, 1: 1 is read at once; 3 comes from below in
        # the place of 2, which was listed last; 2 comes from below in the place of 1, which was read before 3
        where = machine(tiers=[dram(2)])
        demand = tokens(*([[e]] for e in (0, 1, 3, 2, 1)))
        source = ListSource(sizes(1, 4, 1), [Prompted(demand)])
        outcome = replay_lists(source, 1, where, warm=((0, 0), (0, 1), (0, 2)))
        assert outcome.counts("hits", "misses") == (1, 4)
        assert [expert for *_, expert in outcome.spans("fill")] == [3, 2, 1]

    def test_what_follows_a_warm_expert_that_does_not_fit_lies_below_and_more_than_all_tiers_is_refused(self) -> None:
        where, source = machine(tiers=[dram(1)]), ListSource(sizes(1, 4, 1), [Prompted(tokens([[1]], [[1]]))])
        assert replay_lists(source, 1, where, warm=((0, 0), (0, 1)))["bytes_lower"] == 0
        with pytest.raises(ConfigError, match="--warm lists 1 expert more than all tiers hold; name fewer"):
            replay_lists(source, 1, where, warm=((0, 0), (0, 1), (0, 2)))

    def test_two_tiers_are_two_more_links(self) -> None:
        # 4 ns from the disk, 2 ns over CXL, 1 ns into the fast tier; in the same nanosecond the higher tier acts first
        where = machine(tiers=[dram(1), dram(4, bytes_per_ns=0.25)])
        demand = tokens([[0]], [[1]], [[0]])
        outcome = replay_lists(ListSource(sizes(1, 4, 1), [Prompted(demand)]), 1, where)
        # 0: 0-4, 4-6, 6-7; 1: 7-11, 11-13 in the place of 0, 13-14; 0 again is in the second tier: 14-16, 16-17
        assert outcome.spans("fill") == [(0, 4, 0, 0), (4, 6, 0, 0), (7, 11, 0, 1), (11, 13, 0, 1), (14, 16, 0, 0)]
        assert outcome.spans("transfer") == [(6, 7, 0, 0), (13, 14, 0, 1), (16, 17, 0, 0)]


@st.composite
def _streams(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Experts of single tokens, and the capacities of both caches."""
    stream = draw(st.lists(st.integers(0, 5), min_size=1, max_size=40))
    return stream, draw(st.integers(1, 4)), draw(st.integers(1, 6))


@pytest.mark.slow
@settings(deadline=None)
@given(_streams())
def test_one_expert_at_a_time_is_two_lru_lists(case: tuple[list[int], int, int]) -> None:
    """Nothing overlaps, so what has to come from below is what misses in a list of misses."""
    stream, fast, lower = case
    outcome = replay_lists(
        ListSource(sizes(1, 6, 1), [Prompted(tokens(*([[e]] for e in stream)))]), fast, machine(tiers=[dram(lower)])
    )
    missed = misses_of_lru(stream, fast)
    assert [expert for *_, expert in outcome.spans("transfer")] == missed
    assert [expert for *_, expert in outcome.spans("fill")] == misses_of_lru(missed, lower)


def misses_of_lru(stream: list[int], capacity: int) -> list[int]:
    """Count the misses of an LRU list of `size` experts."""
    held, missed = list[int](), list[int]()
    for e in stream:
        if e in held:
            held.remove(e)
        else:
            missed.append(e)
        held = [*held, e][-capacity:]
    return missed


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 9), st.integers(1, 4), st.integers(1, 4))
def test_a_tier_as_fast_as_nothing_changes_no_time(layers: int, latency: int, depth: int, experts: int) -> None:
    """A link of no latency and no width below: only the counter of its bytes tells that it is there."""
    source = ListSource(sizes(layers, 4, 2), [Prompted(tokens([[0, 1]] * layers, [[2, 0]] * layers))])
    with_tier = machine(latency_ns=latency, depth=depth, expert_ns=2, tiers=[dram(4 * layers, float("inf"), 0, 4)])
    without = machine(latency_ns=latency, depth=depth, expert_ns=2)
    free, plain = (replay_lists(source, experts, where) for where in (with_tier, without))
    assert {name for name in free.totals if free[name] != plain[name]} <= {"bytes_lower"}
    assert free.requests == [row | {"bytes_lower": free.requests[0]["bytes_lower"]} for row in plain.requests]


# ---------------------------------------------------------------- platform files

THREE_TIERS = """
name = "three tiers"
fast_tier = "VRAM"
slow_tier = "NVMe"

[link]
bytes_per_s = 25e9
latency_ns = 10_000

[[tiers]]
name = "DRAM"
capacity = "50%"
bytes_per_s = 7e9
latency_ns = 80_000
depth = 4

[compute]
kind = "measured"
expert_ns = 1_000
"""


def test_a_platform_file_with_three_tiers_replays_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    path.write_text(THREE_TIERS)
    machine_of_file = platform(str(path))
    (tmp_path / "again.toml").write_text(as_toml(machine_of_file))
    assert platform(str(tmp_path / "again.toml")) == machine_of_file
    geometry = Geometry(layers=3, experts=8, k=2, expert_bytes=(1_000,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=2, prompt_tokens=2, decode_tokens=30))
    results = {
        capacity: replay(trace, configure(capacity="30%", platform=f"{path}:tiers.0.capacity={capacity}"))
        for capacity in ("40%", "60%", "100%")
    }
    lower = [result.totals["bytes_lower"] for result in results.values()]
    assert lower[0] > lower[1] > lower[2] >= 1_000
    assert len({result.totals["hits"] for result in results.values()}) == 1
    rows = [result.to_json() | {"bounds": None} for result in results.values()]
    assert [line["gb_lower"] for line in ranking(rows)] == sorted(each / 1e9 for each in lower)
    assert len({result.about["identity"] for result in results.values()}) == 3


@every(
    "change, said",
    [
        ("tiers.0.capacity=1B", "tier DRAM: capacity 1B gives the pool 1 bytes, less than one expert"),
        ("tiers.0.capacity=much", "tiers.0.capacity: invalid capacity 'much'"),
        ("tiers.0.bytes_per_s=0", "tiers.0.bytes_per_s"),
        ("tiers.1.depth=2", "has no figure 'tiers.1.depth'"),
        ("tiers.0.capacity=rest", "capacity 'rest' is for one tier, and requires memory_bytes and reserve_bytes"),
    ],
)
def test_a_wrong_tier_is_refused_in_one_line(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "three.toml").write_text(THREE_TIERS)
    geometry = Geometry(layers=1, experts=4, k=1, expert_bytes=(1_000,))
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=1, decode_tokens=2))
    with pytest.raises(ConfigError) as refused:
        replay(trace, configure(capacity="50%", platform=f"{tmp_path / 'three.toml'}:{change}"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@every("engine", ENGINES)
def test_a_page_cache_has_what_the_memory_leaves(tmp_path: Path, engine: str) -> None:
    """24 experts of 1,000 bytes. Memory of 500,022,000: 500 MB of runtime, 2,000 kept, so 20,000 with the cache."""
    kept = "memory_bytes = 500_022_000\nreserve_bytes = 2_000\n"
    (tmp_path / "phone.toml").write_text(kept + THREE_TIERS.replace("50%", "rest"))
    (tmp_path / "three.toml").write_text(THREE_TIERS)
    geometry = Geometry(layers=3, experts=8, k=2, expert_bytes=(1_000,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=2, decode_tokens=30))
    for cache in (4_000, 10_000, 19_000):
        by_hand = f"{tmp_path / 'three.toml'}:tiers.0.capacity={20_000 - cache}B"
        ours, theirs = (
            replay(trace, configure(capacity=f"{cache}B", platform=where), engine=engine).totals
            for where in (str(tmp_path / "phone.toml"), by_hand)
        )
        assert ours == theirs and ours["bytes_lower"] > 0
    with pytest.raises(ConfigError, match="leave no expert to DRAM; lower --capacity"):
        replay(trace, configure(capacity="20000B", platform=str(tmp_path / "phone.toml")))
    with pytest.raises(ConfigError, match="which `recommend` does not size"):
        of_platform(platform(str(tmp_path / "phone.toml")))


def test_miss_policies_that_compute_on_the_cpu_are_refused(tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text(THREE_TIERS + '\n[cpu]\nkind = "measured"\nexpert_ns = 5\n')
    geometry = Geometry(layers=1, experts=4, k=1, expert_bytes=(1_000,))
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=1, decode_tokens=2))
    with pytest.raises(ConfigError, match="which tier it reads"):
        replay(trace, configure(capacity="50%", platform=str(tmp_path / "three.toml"), miss="cpu"))
