"""Timelines of small replays: slices nest, and their sums are the replay's counters."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

from moereplay.analysis.timeline import (
    CACHE,
    COMPUTE,
    CPU,
    FILLS,
    LINKS,
    PASSES,
    QUEUE,
    STALLS,
    Machine,
    Timeline,
    copy_of,
    limited,
)
from moereplay.results.errors import ResultError
from moereplay.results.result import Row
from moereplay.results.trace_events import Instant, Item, Level, Slice, Track, write_items
from moereplay.simulator.platform import Link
from moereplay.simulator.times import homes_of
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.parity import by_matrix
from tests.kit.scenarios import Scenario, scenarios
from tests.kit.search import searched
from tests.simulator.test_laws import tiers_of

REASONS = ("compulsory", "collisions", "capacity")
ENDS_A_MOVE = ("transfer", "fill", "cancel", "drop")


def machine_of(scenario: Scenario) -> Machine:
    where = machine(**scenario.times)
    return Machine(
        links=[f"link {row}" for row in range(len(where.links))],
        fills=[f"tier {row}" for row in range(len(where.tiers))],
        homes=homes_of(where, scenario.source.geometry),
        sizes=tiers_of(scenario),
        queued_together=where.queues_together(scenario.settings["contract"]),
        warm=scenario.settings.get("warm", ()),
    )


def all_items(outcome: Outcome, of: Machine) -> list[Item]:
    made = Timeline(outcome.events, outcome["time_ns"], of)
    passes = len({event.step_pass for event in outcome.events})
    return list(limited(made, range(passes)))


def slices(items: Iterable[Item], track: int | range, begins: str = "") -> list[Slice]:
    tracks = range(track, track + 1) if isinstance(track, int) else track
    every = (item for item in items if isinstance(item, Slice))
    return [each for each in every if each.track in tracks and each.name.startswith(begins)]


def spent(chosen: Iterable[Slice]) -> int:
    return sum(each.t1 - each.t0 for each in chosen)


def args(chosen: Iterable[Slice], name: str) -> int:
    return sum(each.args.get(name, 0) for each in chosen)


FAST, LINK, FILL, ROWS = range(LINKS, LINKS + 16), range(LINKS, FILLS), range(FILLS, QUEUE), range(QUEUE, QUEUE + 9999)


def nests(chosen: Iterable[Slice]) -> bool:
    """Return True if any two are disjoint or nested."""
    around: list[Slice] = []
    for each in sorted(chosen, key=lambda each: (each.t0, -each.t1)):
        while around and around[-1].t1 <= each.t0:
            around.pop()
        if each.t1 < each.t0 or (around and each.t1 > around[-1].t1):
            return False
        around.append(each)
    return True


def slices_nest(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    by_track = defaultdict(list)
    for item in items:
        if isinstance(item, Slice):
            by_track[item.track].append(item)
    for track, chosen in by_track.items():
        assert nests(chosen), track
        if track != PASSES:  # nothing within another
            ordered = sorted(chosen, key=lambda each: (each.t0, each.t1))
            assert all(one.t1 <= other.t0 for one, other in pairwise(ordered)), track


def passes_and_their_layers_fill_the_run(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    for part in ("pass ", "layer "):
        chosen = slices(items, PASSES, part)
        assert [chosen[0].t0, chosen[-1].t1] == [0, outcome["time_ns"]]
        assert all(one.t1 == other.t0 for one, other in pairwise(chosen))
    assert spent(slices(items, PASSES, "dense")) == outcome["dense_ns"]
    assert spent(slices(items, PASSES, "experts")) == outcome["time_ns"] - outcome["dense_ns"]


def compute_and_stalls_add_up_to_the_counters(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    expert, stall = spent(slices(items, COMPUTE, "expert")), spent(slices(items, STALLS))
    expert += spent(slices(items, COMPUTE, "stage"))
    assert spent(slices(items, COMPUTE, "dense")) == outcome["dense_ns"]
    assert spent(slices(items, COMPUTE, "load")) == outcome["loading_ns"]
    assert len(slices(items, CPU)) == outcome["cpu_executed"]
    assert expert + stall == outcome["expert_ns"] + outcome["stall_ns"]
    if all(link.first_piece == 1 for link in machine(**scenario.times).links):
        assert (expert, stall) == outcome.counts("expert_ns", "stall_ns")
    assert all(each.args["awaited"] and each.t1 > each.t0 for each in slices(items, STALLS))


def links_are_as_busy_as_counted(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    moves = [*slices(items, LINK), *slices(items, FILL)]
    fast = [each for each in moves if each.args["into"] == "fast tier"]
    prefetched = [each for each in fast if each.args["cause"] == "prefetch"]
    demanded = [each for each in fast if each.args["cause"] != "prefetch"]
    lower = [each for each in moves if each.args["into"] != "fast tier"]
    found = [args(each, "bytes") for each in (demanded, prefetched, lower)]
    assert tuple(found) == outcome.counts("bytes_demand", "bytes_prefetch", "bytes_lower")
    assert len(prefetched) == outcome["prefetch_started"]
    assert sum(each.args["cause"] == "streamed" for each in fast) == outcome["declined"]
    busy = slices(items, LINK)
    assert args(busy, "busy_ns") == spent(busy) + args(busy, "abandoned_ns")
    if len(scenario.times["tiers"]) <= 1:
        assert args(busy, "busy_ns") == outcome["link_busy_ns"]
    late = [each.args["late_at_ns"] for each in prefetched if "late_at_ns" in each.args]
    assert len(late) == outcome["prefetch_used"] - outcome["prefetch_hits"]
    assert sorted(late) == sorted(event.t0 for event in outcome.events if event.kind == "late")


def layers_say_what_the_counters_count(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    layers = slices(items, PASSES, "layer ")
    for word in ("hits", "late", *REASONS):
        assert args(layers, word) == outcome[word]
    names = {"evict": "evictions", "cancel": "prefetch_cancelled", "drop": "prefetch_dropped"}
    marks = Counter(item.name.split()[0] for item in items if isinstance(item, Instant) and item.track == CACHE)
    for kind, counter in names.items():
        assert args(layers, kind) == marks[kind] == outcome[counter]


def demands_wait_from_their_look_up_to_their_start(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    gates = {(each.step_pass, each.layer): each.t1 for each in outcome.events if each.kind == "dense"}
    ends = {(each.args["pass"], each.name): each.t1 for each in slices(items, PASSES, "layer ")}
    for each in slices(items, ROWS):
        place = each.args["pass"], each.args["layer"]
        assert each.t0 < each.t1
        assert each.name.endswith("prefetch") or each.t0 >= gates[place]
        assert each.t1 <= ends[place[0], f"layer {place[1]}"]


def transfers_are_those_that_a_search_of_the_log_finds(
    scenario: Scenario, outcome: Outcome, items: Sequence[Item]
) -> None:
    """A demand waits from its look-up, or its arrival in a lower tier; a prefetch in the queue of the next link."""
    starts = [(at, event) for at, event in enumerate(outcome.events) if event.kind in ("transfer", "fill")]
    moves = [each for each in items if isinstance(each, Slice) and LINKS <= each.track < QUEUE]
    layers = {(each.args["pass"], each.name): each for each in slices(items, PASSES, "layer ")}
    homes, waits = machine_of(scenario).homes, list[tuple[int, int]]()
    for (at, event), move in zip(starts, moves, strict=True):
        around = layers[move.args["pass"], f"layer {move.args['layer']}"]
        assert around.t0 <= event.t0 == move.args["issued_ns"] <= around.t1
        if event.kind == "transfer":
            assert move.track == LINKS + homes[event.layer * scenario.source.geometry.experts + event.expert]
        resets = [n for n, each in enumerate(outcome.events[:at]) if each.kind == "reset"]
        before = outcome.events[max(resets, default=0) : at]
        moved = [each for each in before if each.kind in ENDS_A_MOVE and copy_of(each) == copy_of(event)]
        if event.cause == "prefetch":
            waits += [(each.t1, event.t0) for each in moved[-1:] if each.kind == "fill"]
        else:
            looks = [each for each in before if each.kind in REASONS and copy_of(each)[:2] == copy_of(event)[:2]]
            waits.append((max(looks[-1].t0, *(each.t1 for each in moved if each.kind == "fill"), 0), event.t0))
            assert move.args["why"] == looks[-1].kind
    if not any(event.kind == "load" for event in outcome.events):  # see test_demands_are_queued_when_they_are_loaded
        found = sorted((each.t0, each.t1) for each in slices(items, ROWS))
        assert found == sorted(wait for wait in waits if wait[0] < wait[1])


def levels_are_those_of_the_cache(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    levels = [item for item in items if isinstance(item, Level)]
    assert all(value >= 0 for level in levels for value in level.values.values())
    last: dict[str, Row] = {}
    for level in levels:
        last[level.name] = dict(level.values)
    assert last["demands queued"] == {"transfers": 0}
    if scenario.settings["reset"] == "never":
        warm = len(scenario.settings.get("warm", ()))
        assert last["resident experts"]["experts"] == warm + outcome["insertions"] - outcome["evictions"]
    if not scenario.settings["prefetch"].startswith("side_buffer"):
        held = [sum(level.values.values()) for level in levels if level.name == "fast tier"]
        bypass = max(map(max, tiers_of(scenario)))  # one buffer, beside the pools
        assert max(held) <= sum(scenario.pools) + bypass * (outcome["declined"] > 0)


def a_track_is_named_before_what_is_on_it(scenario: Scenario, outcome: Outcome, items: Sequence[Item]) -> None:
    named = set()
    for item in items:
        if isinstance(item, Track):
            assert item.number not in named
            named.add(item.number)
        elif not isinstance(item, Level):
            assert item.track in named


LAWS = (
    slices_nest,
    passes_and_their_layers_fill_the_run,
    compute_and_stalls_add_up_to_the_counters,
    links_are_as_busy_as_counted,
    layers_say_what_the_counters_count,
    demands_wait_from_their_look_up_to_their_start,
    transfers_are_those_that_a_search_of_the_log_finds,
    levels_are_those_of_the_cache,
    a_track_is_named_before_what_is_on_it,
)


def hold_every_law(scenario: Scenario) -> None:
    """Replay with one engine: that the other gives the same events is the claim of test_parity."""
    outcome = replay_lists(
        scenario.source, scenario.pools, machine(**scenario.times), engine="reference", **scenario.settings
    )
    items = all_items(outcome, machine_of(scenario))
    for law in LAWS if outcome.events else ():
        law(scenario, outcome, items)


@searched(150)
@given(scenarios())
def test_timelines_of_any_scenario_hold_every_law(scenario: Scenario) -> None:
    hold_every_law(scenario)


@searched(150)
@given(by_matrix())
def test_timelines_of_links_that_read_matrix_by_matrix_hold_every_law(scenario: Scenario) -> None:
    hold_every_law(scenario)


@every(
    "contract, prices, queued",
    [
        ("atomic", {"overlap": "none"}, [(0, 0), (2, 1), (4, 0)]),  # both at 2; the second starts when the first ends
        ("sequential", {"overlap": "none"}, [(0, 0)]),  # each at the end of its own load, when the link is idle
        ("sequential", {"link": {"by_matrix": True}}, [(0, 0)]),
    ],
)
def test_demands_are_queued_when_they_are_loaded(contract: str, prices: Row, queued: list[tuple[int, int]]) -> None:
    # two experts of 1 byte: each takes 1 ns to load and 2 on the link
    times = {"bytes_per_ns": 0.5, "tiers": (), "prices": prices | {"loading": {"ns_per_expert": 1}}}
    source = ListSource(sizes(1, 2, 2, 1), [Prompted(tokens([[0, 1]]))])
    scenario = Scenario(source, (2,), times, {"contract": contract, "miss": "fetch"})
    items = all_items(replay_lists(source, 2, machine(**times), contract=contract), machine_of(scenario))
    levels = [item for item in items if isinstance(item, Level) and item.name == "demands queued"]
    assert [(level.t, level.values["transfers"]) for level in levels] == queued


def test_a_step_on_a_page() -> None:
    # two experts of 4 bytes at a byte per ns behind one link: dense to 3, the link to 7 and 11, compute 2 ns each
    source = ListSource(sizes(1, 3, 2, 4), [Prompted(tokens([[0, 1]]))])
    outcome = replay_lists(source, 12, machine(dense_ns=3, expert_ns=2))
    items = all_items(outcome, Machine(["DRAM to VRAM"], [], (0, 0, 0), ((4,),)))
    found = [(each.track, each.name, each.t0, each.t1) for each in items if isinstance(each, Slice)]
    assert found == [
        (PASSES, "pass 0", 0, 13),
        (PASSES, "layer 0", 0, 13),
        (PASSES, "dense, gate", 0, 3),
        (PASSES, "experts", 3, 13),
        (COMPUTE, "dense L0", 0, 3),
        (COMPUTE, "expert L0 E0", 7, 9),
        (COMPUTE, "expert L0 E1", 11, 13),
        (STALLS, "wait for L0 E0 and 1 more", 3, 7),
        (STALLS, "wait for L0 E1", 9, 11),
        (LINKS, "L0 E0 demand", 3, 7),
        (LINKS, "L0 E1 demand", 7, 11),
        (QUEUE, "L0 E1 demand", 3, 7),
    ]
    held = [(each.t, each.values["experts"]) for each in items if isinstance(each, Level) and "experts" in each.values]
    assert held == [(0, 0), (7, 1), (11, 2)]


def test_a_reset_cuts_what_is_on_the_wire_and_what_waits_for_it() -> None:
    # layer 1 behind link 1, two at once, 40 ns each: gate at 2, bytes of (1, 2) from 2, of (1, 3) from 42. Both layers
    # hit, 2 + 3 ns each, and the request ends at 10. Cut: 42 - 10, and all 40 of what has not begun
    token = [Cell([0], look=[naming(4, [2, 3])]), Cell([0])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=40), [Prompted([token])] * 2)
    how: Row = {"prefetch": "top_k:factor=2", "reset": "request", "warm": ((0, 0), (1, 0))}
    more = (Link(bytes_per_s=1e9, depth=2, layers="1"),)
    outcome = replay_lists(source, 400, machine(dense_ns=2, expert_ns=3, layers="0", more=more), **how)
    items = all_items(outcome, Machine(["zero", "one"], [], (0,) * 4 + (1,) * 4, ((40, 40),)))
    cut = slices(items, LINKS + 1)[:2]
    assert [(each.t0, each.t1) for each in cut] == [(2, 10), (10, 10)]
    assert [(each.args["abandoned_ns"], each.args["busy_ns"]) for each in cut] == [(32, 40), (40, 40)]


def test_times_are_written_with_every_digit(tmp_path: Path) -> None:
    far = 10**18 + 1  # more than a float of microseconds tells apart
    items = [Track(1, "a"), Slice(1, "é", 1, far + 1, {}), Instant(1, "b", 1000, {}), Level("c", far, {"d": 2})]
    assert write_items(tmp_path / "x.json", "p", {}, items) == len(items)
    text = (tmp_path / "x.json").read_text()
    assert '"ts":0.001,"dur":1000000000000000.001,' in text and '"ts":1,' in text
    assert write_items(tmp_path / "x.json.gz", "p", {}, items) == len(items)
    assert gzip.decompress((tmp_path / "x.json.gz").read_bytes()).decode() == text
    assert json.loads(text)["traceEvents"][-1]["args"] == {"d": 2}


def test_what_is_raised_on_the_way_leaves_no_file(tmp_path: Path) -> None:
    def items() -> Iterator[Item]:
        yield Track(1, "a")
        raise ResultError("enough")

    with pytest.raises(ResultError, match="enough"):
        write_items(tmp_path / "x.json.gz", "p", {}, items())
    assert list(tmp_path.iterdir()) == []
