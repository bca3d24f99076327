"""Requests that arrive over time: passes by hand, times of arrival, prompts in pieces, and laws of queues."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from moereplay.policies.contract import PolicyError
from moereplay.simulator.arrivals import arrival_times
from moereplay.simulator.bounds import judge, remarks
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Trace
from moereplay.traces.units import UNIT
from tests.kit.cases import ENGINES, Cell, ListSource, Outcome, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.parity import arriving
from tests.kit.policy_runs import Sizes, memory_trace, random_trace
from tests.kit.scenarios import Scenario
from tests.kit.schedules import hash53
from tests.kit.search import searched

WHERE = machine(bytes_per_ns=1 / 5, dense_ns=3, expert_ns=2, expert_ns_per_token=1)
Rows = list[dict[str, Any]]


def arrived(requests: list[Prompted], arrivals: tuple[int, ...], slots: int, pool: int = 4, **how: Any) -> Outcome:
    """Replay requests of one layer of four experts on both engines."""
    alone = f"batch:1{how.pop('chunk', '')}"
    source = ListSource(sizes(1, 4, 1), requests, alone, arrive=True)
    passes = f"batch:{slots}{alone.removeprefix('batch:1')}"
    return replay_lists(source, pool, how.pop("where", WHERE), arrivals_ns=arrivals, passes=passes, **how)


# ---------------------------------------------------------------- by hand


def test_three_requests_at_two_slots_by_hand() -> None:
    """One layer, two slots. Dense 3 ns, an expert 2 ns and 1 ns per token, a transfer 5 ns, room for all four experts.

    Request 0 arrives at 2: prompt (0, 1), token 2. Request 1 at 10: prompt (0), token 3. Request 2 at 12: token 0.

    Compute idles until 2. Pass 0, a prompt: gate at 5, 0 arrives at 10 and runs to 13, 1 arrives at 15 and runs to 18.
    At 18 requests 1 and 2 are there; slot 1 is free and takes request 1.
    Pass 1, token 2 of request 0 and the prompt of request 1: gate at 21, 0 is a hit and runs to 24, 2 arrives at 26 and
    runs to 29. Request 0 ends at 29, and slot 0 takes request 2, which has waited from 12 to 29.
    Pass 2, by slot: token 0 of request 2, token 3 of request 1: gate at 32, 0 hits and runs to 35, 3 arrives at 37, 40.
    """
    requests = [
        Prompted(tokens([[0]], [[1]], [[2]]), 2),
        Prompted(tokens([[0]], [[3]]), 1),
        Prompted(tokens([[0]]), 0),
    ]
    found = arrived(requests, (2, 10, 12), slots=2)
    names = ("request", "arrival_ns", "queued_ns", "start_ns", "ttft_ns", "decode_ns", "decode_passes", "end_ns")
    assert [[row[name] for name in names] for row in found.requests] == [
        [0, 2, 0, 2, 16, 11, 1, 29],
        [1, 10, 8, 18, 11, 11, 1, 40],
        [2, 12, 17, 29, None, 11, 1, 40],
    ]
    assert found.counts("accesses", "hits", "misses", "dense_ns", "time_ns") == (6, 2, 4, 9, 40)
    assert [event.t0 for event in found.events if event.kind == "dense"] == [2, 18, 29]
    assert [event.step_pass for event in found.events if event.kind == "dense"] == [0, 1, 2]


def test_links_go_on_while_compute_idles_and_what_lands_as_it_ends_has_landed() -> None:
    """Two layers, requests of one token: expert 0, then expert 1 (request 0) or 3 (request 1). Both predict 3.

    Dense 1 ns, an expert 1 ns, a transfer 5 ns; expert 1 of layer 1 is there from the start. A reset by request.

    Pass 0: gate at 1, 0 arrives at 6, the prefetch of 3 behind it at 11; runs to 7; gate at 8, 1 hits and runs to 9.
    Request 1 arrives at 11. Compute idles from 9; the prefetch lands in the nanosecond in which idling ends, so before
    the reset: 0, 3 and then again 0 and 3 become resident. If it arrives at 10, the reset abandons the prefetch.
    Pass 1 begins with nothing: 0 arrives at + 6, 3 at + 11, behind it; it is late, and runs to + 12.
    """
    look = ((0, 0, 0, UNIT),)
    requests = [
        Prompted([[Cell([0], (UNIT,), look), Cell([last], (UNIT,))]], 0)  # nothing follows the last layer
        for last in (1, 3)
    ]
    source = ListSource(sizes(2, 4, 1), requests, "batch:1", arrive=True)
    where = machine(bytes_per_ns=1 / 5, dense_ns=1, expert_ns=1)
    how = {"passes": "batch:1", "prefetch": "top_k", "reset": "request", "warm": ((1, 1),)}
    for arrival, insertions in ((11, 4), (10, 3)):
        found = replay_lists(source, 8, where, arrivals_ns=(0, arrival), **how)
        assert [event.t0 for event in found.events if event.kind == "reset"] == [arrival]
        assert found["insertions"] == insertions
        assert found["time_ns"] == arrival + 12


def test_links_are_woken_when_compute_begins_to_idle() -> None:
    """Requests of expert 0 alone; what a pass leaves out is prefetched after its demand, for the next pass.

    Pass 0: gate at 3, 0 is left out, its prefetch is queued at 3 and the pass ends. Compute idles and the transfer runs
    from 3 to 8, of request 0. Request 1 arrives at 20: gate at 23, a hit, 26. One that is there at 3 lets nothing idle:
    its pass begins and wakes the links, so that the transfer is its own; gate at 6, late, from 8 to 11.
    """
    requests = [Prompted(tokens([[0]]), 0)] * 2
    how: dict[str, Any] = {"miss": "drop:keep=0", "prefetch": "missed:of=dropped", "prefetch_at": "after_demand"}
    for arrival, end, whose in ((20, 26, [1, 0]), (3, 11, [0, 1])):
        found = arrived(requests, (0, arrival), slots=1, **how)
        assert found.spans("transfer") == [(3, 8, 0, 0)]
        assert found["time_ns"] == end
        assert [row["prefetch_started"] for row in found.requests] == whose


def test_a_prompt_in_pieces_beside_decoding_by_hand() -> None:
    """Request 0 has a prompt of 3 tokens and decodes one, request 1 decodes two; two slots, pieces of 2.

    Pass 0: tokens 0, 1 of request 0 and token 0 of request 1. Pass 1: token 2 of the prompt and token 1 of request 1,
    which ends. Pass 2: the decoded token of request 0. Nothing is missed after pass 0; n tokens take an expert 2 + n.
    """
    requests = [Prompted(tokens([[0]], [[0]], [[0]], [[0]]), 3), Prompted(tokens([[0]], [[0]]), 0)]
    for found in (
        arrived(requests, (0, 0), slots=2, chunk=":chunk=2"),
        replay_lists(ListSource(sizes(1, 4, 1), requests, "batch:2:chunk=2"), 4, WHERE, passes="batch:2:chunk=2"),
    ):
        ends = [event.t1 for event in found.events if event.kind == "expert"]
        assert ends == [3 + 5 + 5, 13 + 3 + 4, 20 + 3 + 3]
        assert [row["ttft_ns"] for row in found.requests] == [20, None]
        assert [row["end_ns"] for row in found.requests] == [26, 20]
        assert [row["decode_ns"] for row in found.requests] == [6, 20]


def test_a_given_profile_needs_no_future() -> None:
    """Two slots and room for one expert; the profile ranks 2, then 0. Request 0 decodes 0, 1, request 1 from 4: 2, 0.

    Pass 0: gate at 3, 0 arrives at 8 and runs to 11. Pass 1, rows of both: gate at 14, 1 arrives at 19, is not ranked,
    so 0 stays; it runs to 22. 2 takes the room of 0, arrives at 24 and runs to 27. Pass 2: gate at 30, 0 arrives at 35,
    2 stays; it runs to 38. Request 2 arrives at 50, its token at 2: gate at 53, a hit, where `lru` would miss; 56.
    """
    requests = [
        Prompted(tokens([[0]], [[1]]), 0),
        Prompted(tokens([[2]], [[0]]), 0),
        Prompted(tokens([[2]]), 0),
    ]
    how = {"slots": 2, "pool": 1}
    found = arrived(requests, (0, 4, 50), eviction="static:profile=given", profile=((0, 2), (0, 0)), **how)
    assert [event.t1 for event in found.events if event.kind == "expert"] == [11, 22, 27, 38, 56]
    assert found.counts("hits", "misses", "evictions") == (1, 4, 1)
    assert arrived(requests, (0, 4, 50), **how)["time_ns"] == 53 + 5 + 3


# ---------------------------------------------------------------- all at the start


@searched(60)
@given(arriving())
def test_arrivals_at_the_start_are_the_schedule_of_batches(scenario: Scenario) -> None:
    """Requests that all arrive at 0 have the passes of `--passes batch:N`: every counter, time and event."""
    settings = {name: value for name, value in scenario.settings.items() if name != "arrivals_ns"}
    where, source = machine(**scenario.times), scenario.source
    zeros = tuple(0 for _ in source.requests)
    there = replay_lists(source, scenario.pools, where, engine="reference", arrivals_ns=zeros, **settings)
    laid = ListSource(source.geometry, source.requests, str(settings["passes"]), source.guess)
    assert replay_lists(laid, scenario.pools, where, engine="reference", **settings) == there


TRACE = random_trace(3, Sizes(layers=3, experts=6, k=2, tokens=9, prompt=5, requests=4, size=1, depth=2))


@every("size", [1, 2, 3, 5, 9])
def test_one_slot_in_pieces_has_the_passes_of_chunk(size: int) -> None:
    one, other = schedule(TRACE, f"batch:1:chunk={size}"), schedule(TRACE, f"chunk:{size}")
    assert one.start.tolist() == other.start.tolist()
    assert one.phase.tolist() == other.phase.tolist()
    assert one.rows is None
    many = schedule(TRACE, f"batch:3:chunk={size}")
    assert (many.stop - many.start).sum() == TRACE.tokens
    assert (many.stop - many.start).max() <= 3 * size


# ---------------------------------------------------------------- laws of queues


def queue(arrivals: tuple[int, ...], slots: int, decoded: int = 1) -> Outcome:
    """Requests of so many tokens that all use one expert: every pass takes 3 + 2 + 1 x tokens ns, the first 5 more."""
    requests = [Prompted(tokens(*[[[0]]] * decoded), 0)] * len(arrivals)
    return arrived(requests, arrivals, slots, engine="compiled", log=False)


@pytest.mark.slow
@every("load", [0.4, 0.7])
def test_one_slot_is_a_queue_of_poisson_arrivals_and_constant_service(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services; within 5 standard errors of it, by blocks of requests."""
    service, many = 6, 4_000
    waits = md1_waits(load, service, many)
    mean = load / (2 * (1 - load)) * service
    blocks = [sum(waits[at : at + 400]) / 400 for at in range(0, many, 400)]
    found = sum(blocks) / len(blocks)
    error = math.sqrt(sum((each - found) ** 2 for each in blocks) / (len(blocks) - 1) / len(blocks))
    assert abs(found - mean) < 5 * error + 0.5  # arrivals are whole nanoseconds
    assert error < 0.25 * mean  # or it would say nothing


def md1_waits(load: float, service: int, many: int) -> list[int]:
    """Waits of requests at one slot; the first ones see a queue that is not full yet, and are few."""
    found = queue(arrival_times(f"poisson:{load / service * 1e9!r}", 7, many), slots=1)
    rows = sorted(found.requests, key=lambda row: row["request"])
    assert {row["decode_ns"] for row in rows[1:]} == {service}
    for before, row in pairwise(rows):  # first come, first served, without a gap while anyone waits
        assert row["start_ns"] == max(row["arrival_ns"], before["end_ns"])
    return [row["queued_ns"] for row in rows]


@searched(60)
@given(arriving())
def test_littles_law_holds_in_every_run(scenario: Scenario) -> None:
    """The number of requests in the system, integrated over time from events, is the sum of their sojourns.

    A pass holds the requests that its rows say: the log of passes and the rows of requests are counted apart.
    """
    found = replay_lists(
        scenario.source, scenario.pools, machine(**scenario.times), engine="reference", **scenario.settings
    )
    rows = found.requests
    assert {row["request"] for row in rows} == set(range(len(scenario.source.requests)))
    changes = sorted([(row["arrival_ns"], 1) for row in rows] + [(row["end_ns"], -1) for row in rows])
    area, level = 0, 0
    for (time, change), (later, _) in pairwise([*changes, (found["time_ns"], 0)]):
        level += change
        area += level * (later - time)
    assert area == sum(row["end_ns"] - row["arrival_ns"] for row in rows)
    assert all(row["queued_ns"] >= 0 for row in rows)
    assert [row["start_ns"] for row in rows] == sorted(row["start_ns"] for row in rows)


# ---------------------------------------------------------------- times


def test_hash_and_gaps_are_those_of_the_text() -> None:
    assert hash53(0, 0) == 4_003_701_648_326_803
    assert arrival_times("every:0.1", 0, 4) == (0, 100_000_000, 200_000_000, 300_000_000)
    assert arrival_times("every:0", 0, 2) == (0, 0)
    assert arrival_times("at:0/0.0000000005/0.0000000015/2", 0, 4) == (0, 0, 2, 2_000_000_000)  # halves to even
    for rate, text in ((3, "poisson:3"), (1e-6, "poisson:1e-6")):
        at = exact = Fraction(0)  # of years, doubles are 60 ns apart: gaps are not added up exactly
        for r, time in enumerate(arrival_times(text, 5, 200)):
            gap = -float(Decimal(1 - hash53(5 + 2, r) / 2**53).ln()) / rate
            at, exact = Fraction(float(at) + gap), exact + Fraction(gap)
            assert time == round(at * 10**9)
    assert time != round(exact * 10**9)


@every(
    "text", ["", "all:1", "every", "every:", "every:-1", "every:x", "every:1_0", "poisson:0", "poisson:1e400", "at:"]
)
def test_what_is_no_arrival_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid arrivals .*expected all, every:S, poisson:R"):
        configure(passes="batch:2", arrivals=text)


def test_names_that_are_misspelt_have_a_suggestion() -> None:
    for said, settings in (
        ("did you mean poisson?", {"passes": "batch:2", "arrivals": "poison:5"}),
        ("did you mean batch?", {"passes": "bach:2"}),
        ("did you mean recorded?", {"draft": "recordd"}),
        ("did you mean qwen3.6-mtp?", {"draft": "2:accept=qwen3.6-mpt"}),
        ("did you mean rejected?", {"draft": "2:rejectd=own"}),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            configure(**settings)


def test_times_that_fall_or_are_too_late_or_too_few_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not decrease"):
        configure(passes="batch:2", arrivals="at:1/0")
    assert configure(passes="batch:2", arrivals="at:4611686018.427387904").arrive  # 2**62 ns
    with pytest.raises(ConfigError, match="146 years"):
        configure(passes="batch:2", arrivals="at:4611686018.427387905")
    with pytest.raises(ConfigError, match="requires --passes batch:N"):
        configure(passes="chunk:2", arrivals="every:1")
    with pytest.raises(ConfigError, match="lists 1 time; the trace has 4 requests"):
        replay(TRACE, configure(capacity="50%", passes="batch:2", arrivals="at:0"))
    for wrong in ("{}", "[]", "[true]", '["1"]', "[NaN]", "x", "[-1]"):
        (tmp_path / "times.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"arrivals .*(times\.json|expected)"):
            configure(passes="batch:2", arrivals=str(tmp_path / "times.json"))


def test_a_file_of_times_is_part_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps([0, 0.25, 1e-5 + 0.25, 3]))
    config = configure(capacity="50%", passes="batch:2", arrivals=str(path))
    assert config.arrivals == "at:0/0.25/0.25001/3"
    found = replay(TRACE, config)
    assert [row["arrival_ns"] for row in found.per_request] == [0, 250_000_000, 250_010_000, 3_000_000_000]


# ---------------------------------------------------------------- traces


PROFILE = tuple((layer, expert) for layer in range(3) for expert in (4, 1))
SETTINGS: dict[str, dict[str, Any]] = {
    "lru": {},
    "given profile": {"eviction": "static:profile=given", "profile": PROFILE, "warm": PROFILE[:2]},
    "given pins": {"eviction": "pinned:profile=given:share=.5", "profile": PROFILE},
    "looks ahead": {"prefetch": "top_k:depth=2", "eviction": "least_stale"},
    "reads the position": {"eviction": "hobbit", "reset": "request"},
    "reads scores": {"eviction": "shielded_score:n=1", "prefetch": "top_k:source=current_gate", "reset": "request"},
    "routes": {"routing": "cache_prior:lam=1:top_j=0", "miss": "drop:keep=1", "reset": "7"},
    "substitutes": {"miss": "substitute:tolerance=.5", "contract": "sequential"},
    "precisions": {"miss": "cascade"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_both_engines_replay_a_trace_whose_requests_arrive(settings: dict[str, Any]) -> None:
    for passes, arrivals in (
        ("batch:1", "poisson:1e6"),
        ("batch:2", "every:0.00003"),
        ("batch:3:chunk=2", "at:0/0/0/1"),
    ):
        config = configure(capacity="50%", passes=passes, arrivals=arrivals, **settings)
        compiled, reference = (replay(TRACE, config, log=True, engine=engine) for engine in ENGINES)
        assert compiled == reference, (passes, arrivals)


@every("requests", [2, 4, 7, 13])
def test_a_trace_of_which_more_requests_arrive_begins_anew(requests: int) -> None:
    """It is the trace that holds its requests so often: every counter and every request, in both engines."""
    longer = memory_trace(TRACE.header, [TRACE.request(at % TRACE.requests) for at in range(requests)])
    for name in ("lru", "looks ahead", "reads the position", "routes"):
        config = configure(capacity="50%", passes="batch:3:chunk=2", arrivals="poisson:1e6", **SETTINGS[name])
        expected = replay(longer, config)
        for engine in ENGINES:
            found = replay(TRACE, config, engine=engine, requests=requests)
            assert (found.totals, found.per_request) == (expected.totals, expected.per_request), (name, engine)


@every("settings", [{"eviction": "belady"}, {"prefetch": "oracle"}, {"eviction": "static"}, {"eviction": "pinned"}])
def test_what_needs_the_future_is_refused_by_name(settings: dict[str, str]) -> None:
    for engine in ENGINES:
        with pytest.raises(PolicyError, match=f"{next(iter(settings.values()))}.* under --arrivals depends on times"):
            replay(TRACE, configure(capacity="50%", passes="batch:2", arrivals="every:1", **settings), engine=engine)
    assert replay(TRACE, configure(capacity="50%", passes="batch:2", arrivals="all", **settings)).totals["time_ns"]


def test_there_is_no_bound_and_a_remark_says_so(tiny: Trace = TRACE) -> None:
    config = configure(capacity="50%", passes="batch:2", arrivals="every:1")
    assert judge(tiny, config).bound is None
    assert any("depends on when requests arrive" in line for line in remarks(tiny, [config]))
    assert judge(tiny, configure(capacity="50%", passes="batch:2")).bound is not None
