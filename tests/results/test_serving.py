"""Figures of serving: percentiles, latencies from arrival, goodput, the largest rate, and latency against rate."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moereplay.analysis.figures.catalogue import SERVING_FIGURES, draw_all
from moereplay.analysis.figures.catalogue import chart as chart_of
from moereplay.analysis.ranking import served_at, served_lines
from moereplay.results.errors import ResultError
from moereplay.results.files import to_frame
from moereplay.results.result import Result
from moereplay.results.serving import (
    FINE,
    SETTLED,
    Level,
    figures,
    is_stable,
    parse_level,
    percentile,
    rate_of,
    steady,
)
from moereplay.simulator.arrivals import arrival_times
from moereplay.simulator.capacity import EVERY_EXPERT
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.sweeps.grid import Repeats, all_resident, at_rate, largest_rate
from moereplay.traces.schema import Trace
from tests.kit.command import moereplay_here
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, memory_trace, random_trace

TRACE = random_trace(3, Sizes(layers=2, experts=6, k=2, tokens=6, prompt=3, requests=8, size=1_000_000))


def row(arrival: int, queued: int, ttft: int | None, decode: int, tokens: int) -> dict[str, Any]:
    """The row of a request whose passes follow one another."""
    end = arrival + queued + (ttft or 0) + decode
    times = {"arrival_ns": arrival, "queued_ns": queued, "ttft_ns": ttft, "decode_ns": decode, "decode_tokens": tokens}
    return times | {"start_ns": arrival + queued, "end_ns": end}


#: TTFT from arrival 5, 14, none; TPOT 5, 10, 3 1/3; end to end 15, 24, 40 (units of 1 ms).
MS = 10**6
ROWS = [
    row(0, 0, 5 * MS, 10 * MS, 2),
    row(10 * MS, 4 * MS, 10 * MS, 10 * MS, 1),
    row(20 * MS, 30 * MS, None, 10 * MS, 3),
]


def test_figures_by_hand() -> None:
    """From the first arrival, 0, to the last end, 60 ms: 3 requests and 6 decoded tokens."""
    found = figures(ROWS, parse_level("ttft=14ms,tpot=9ms"))
    assert [found[f"ttft_p{each}_ms"] for each in (50, 90, 99)] == [5, 14, 14]
    assert [found[f"tpot_p{each}_ms"] for each in (50, 90, 99)] == [5, 10, 10]
    assert [found[f"e2e_p{each}_ms"] for each in (50, 90, 99)] == [24, 40, 40]
    assert found["queued_mean_ms"] == pytest.approx(34 / 3)
    assert (found["requests_per_s"], found["throughput_tokens_per_s"]) == (3 / 0.06, 6 / 0.06)
    assert (found["slo_share"], found["goodput_per_s"]) == (2 / 3, 2 / 0.06)  # the second is too slow per token
    assert "slo_share" not in figures(ROWS)
    assert figures(ROWS[2:])["ttft_p50_ms"] is None


def test_a_percentile_is_the_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, each) for each in (50, 90, 99)] == [50, 90, 99]
    assert [percentile([3, 1, 2], each) for each in (50, 90, 99)] == [2, 3, 3]
    assert percentile([], 50) is None


def test_a_level_is_read() -> None:
    assert parse_level("ttft=2s,tpot=100ms") == Level({"ttft": 2 * 10**9, "tpot": 10**8}, Fraction(9, 10))
    assert parse_level("e2e=1.5us,share=1") == Level({"e2e": 1500}, Fraction(1))
    assert parse_level("ttft=14ms,share=0.66").holds(ROWS)
    assert not parse_level("ttft=13ms,share=0.9").holds(ROWS)


@every("text", ["", "ttft", "ttft=2", "ttft=0s", "share=0.5", "ttft=1s,ttft=2s", "x=1s", "ttft=1s,share=2", "tpot=1h"])
def test_what_is_no_level_is_refused(text: str) -> None:
    with pytest.raises(ResultError, match=r"invalid --slo .*expected ttft=TIME"):
        parse_level(text)


# ---------------------------------------------------------------- the largest rate


def on(trace: Trace) -> Callable[[ReplayConfig, int], Result]:
    return lambda config, requests: replay(trace, config, requests=requests)


def times(trace: Trace, many: int) -> Trace:
    """The requests of a trace, again and again."""
    return memory_trace(trace.header, [trace.request(at) for at in range(trace.requests)] * many)


@pytest.mark.slow
@every("slo", ["e2e=5ms", "tpot=10ms"])
def test_the_largest_rate_is_that_of_the_trace_repeated(slo: str) -> None:
    """A rate is of an endless run, so a trace has that of itself 2, 5 or 10 times; the next rate does not hold."""
    config, level, repeats = configure(capacity="50%", passes="batch:2"), parse_level(slo), Repeats(512, 2048)
    found = largest_rate(on(TRACE), config, level, repeats)
    assert found.rate is not None
    for many in (2, 5, 10):
        again = largest_rate(on(times(TRACE, many)), config, level, repeats).rate
        assert again == pytest.approx(found.rate, rel=0.05)
    assert found.settled
    assert found.moved is not None
    assert found.moved <= SETTLED
    later = at_rate(config, f"{found.rate * FINE**2:.4g}")
    assert found.by_queue == slo.startswith("tpot")
    assert found.rate * FINE**2 > found.most or not _holds(later, len(found.result.per_request), level)


def _holds(config: ReplayConfig, requests: int, level: Level) -> bool:
    rows = on(TRACE)(config, requests).per_request
    return level.holds(steady(rows, 2)) and is_stable(rows)


SHORT = random_trace(3, Sizes(layers=1, experts=2, k=1, tokens=1, prompt=1, requests=3, size=1_000_000))
QUEUE = configure(capacity="100%", passes="batch:1", resident=EVERY_EXPERT)
SERVICE = 5_490  #: ns of each of these requests, where every expert is resident


def lindley(config: ReplayConfig, requests: int) -> Result:
    """A queue in plain Python, first come, first served, in place of a replay of SHORT."""
    rows, free = list[dict[str, Any]](), 0
    for number, arrival in enumerate(arrival_times(config.arrivals, config.seed, requests)):
        start = max(arrival, free)
        free = start + SERVICE
        rows.append(row(arrival, start - arrival, SERVICE, 0, 0) | {"request": number})
    return replace(replay(SHORT, QUEUE), config=config.model_dump(), per_request=rows)


def waits_at_most(services: float, load: float) -> float:
    """The share of requests that wait so many services or less in M/D/1 (Erlang 1909)."""
    terms = ((load * (i - services)) ** i / math.factorial(i) * math.exp(load * (services - i)) for i in range(9))
    return (1 - load) * sum(term for i, term in enumerate(terms) if i <= services)


@pytest.mark.slow
@every("services, share", [(2, 0.9), (6, 0.5)])
def test_the_largest_rate_of_one_slot_is_that_of_m_d_1(services: int, share: float) -> None:
    """The search over replays finds what it finds over Lindley's recursion, and that is the closed form's rate.

    Of M/D/1 the mean wait is load / (2 (1 - load)) services, and the share of short waits is `waits_at_most`.
    """
    level = parse_level(f"ttft={(services + 1) * SERVICE}ns,share={share}")
    found = largest_rate(lindley, QUEUE, level, Repeats(1 << 13, 1 << 13))
    assert found.rate is not None
    load = found.rate * SERVICE / 1e9
    assert waits_at_most(services, load / 1.05) > share > waits_at_most(services, load * 1.05)
    mean = sum(each["queued_ns"] for each in found.rows) / len(found.rows) / SERVICE
    assert load == pytest.approx(2 * mean / (1 + 2 * mean), rel=0.05)
    assert found.most == pytest.approx(1e9 / SERVICE, rel=1e-6)
    shorter = Repeats(1 << 10, 1 << 10)
    ours, theirs = (largest_rate(search, QUEUE, level, shorter) for search in (on(SHORT), lindley))
    assert (ours.rate, ours.most, ours.moved, ours.tried) == (theirs.rate, theirs.most, theirs.moved, theirs.tried)


@every("load, stable", [(0.5, True), (0.95, True), (1.1, False), (1.5, False)])
def test_a_queue_that_grows_is_not_stable(load: float, stable: bool) -> None:
    """From arrivals at equal distances and from Poisson's, however short the waits are that a finite run still sees."""
    gap = SERVICE / load / 1e9
    for arrivals in (f"every:{gap:.12f}", f"poisson:{1 / gap!r}"):
        assert is_stable(lindley(QUEUE.model_copy(update={"arrivals": arrivals}), 8_000).per_request) == stable


def test_a_rate_of_a_cold_server_is_that_of_a_resident_one() -> None:
    """At a capacity of all experts only the first requests load any: their time does not count."""
    config, level = configure(capacity="100%", passes="batch:2"), parse_level("ttft=1ms,tpot=1ms,share=1")
    cold, warm = (largest_rate(on(TRACE), each, level, Repeats(512, 512)) for each in (config, all_resident(config)))
    assert cold.rate
    assert cold.rate == pytest.approx(warm.rate, rel=0.02)
    assert cold.result.totals["misses"] > warm.result.totals["misses"] == 0


def test_a_level_that_no_or_every_request_meets_and_a_search_that_is_cut() -> None:
    """No rate, or the throughput of a server that is never idle; both are said, as is a search without enough work."""
    config = configure(capacity="50%", passes="batch:2")
    levels = [parse_level(slo) for slo in ("e2e=1ns", "tpot=10ms", "e2e=5ms")]
    never, always, cut = (largest_rate(on(TRACE), config, each, Repeats(512, 512)) for each in levels)
    assert never.rate is None
    assert always.rate is not None
    assert 0.95 * always.most < always.rate < always.most
    lines = served_lines(served_at([never, always, cut], levels[2], [always] * 3), levels[2], "")
    said = " ".join(lines).replace("\n ", "")
    assert "requests that run alone do not meet the SLO" in said
    assert "limited by throughput, not by the SLO" in said
    assert "not settled with 512 requests" in said
    assert "every rate" not in said


def test_the_rate_of_a_setting() -> None:
    assert [rate_of(text) for text in ("poisson:2.5", "every:0.25", "every:0", "all", "at:0/1", None)] == [
        2.5,
        4,
        None,
        None,
        None,
        None,
    ]


@pytest.mark.slow
def test_latency_against_rate_has_a_panel_per_latency_and_a_line_per_capacity() -> None:
    results = [
        replay(TRACE, configure(capacity=capacity, passes="batch:2", arrivals=f"poisson:{rate}"))
        for capacity in ("40%", "80%")
        for rate in (100, 300, 900)
    ]
    frame = to_frame(results, [None] * len(results))
    found = chart_of("latency_by_rate", frame, level=parse_level("ttft=3ms,e2e=2s"))
    for name, panel in zip(("ttft", "tpot", "e2e"), found.panels[0], strict=True):
        assert [each.name for each in panel.series] == ["40%", "80%"]
        expected = [figures(result.per_request)[f"{name}_p99_ms"] for result in results]
        assert [point.y for each in panel.series for point in each.points] == expected
        assert [point.x for point in panel.series[0].points] == [100, 300, 900]
        assert [rule.at for rule in panel.rules] == {"ttft": [3], "tpot": [], "e2e": [2000]}[name]
    assert "p99 of 8 requests: the slowest one." in found.note
    assert "Dashed" in found.note
    assert "Dashed" not in chart_of("latency_by_rate", frame, level=None).note
    assert "slowest" not in chart_of("latency_by_rate", frame, percentile="50").note
    names = [name for name, _ in draw_all(frame).figures]
    assert set(SERVING_FIGURES) <= set(names)
    with pytest.raises(ResultError, match="two rates of arrivals or more"):
        chart_of("latency_by_rate", to_frame(results[:1], [None]))


def test_panels_of_latency_go_by_policy_then_by_the_numbers_of_settings() -> None:
    results = [
        replay(TRACE, configure(eviction=eviction, passes="batch:2", draft=draft, capacity="60%", arrivals=arrivals))
        for draft in ("10", "2", "0")
        for eviction in ("lru", "fifo")
        for arrivals in ("poisson:900", "poisson:100")
    ]
    found = chart_of("latency_by_rate", to_frame(results, [None] * len(results))).rows
    drafts = ["draft 0", "draft 2:accept=0.7:rejected=other", "draft 10:accept=0.7:rejected=other"]
    assert found == [f"{eviction}, {draft}" for eviction in ("fifo", "lru") for draft in drafts]


def test_the_command_prints_and_searches(tmp_path: Path) -> None:
    run = ("replay", "miniature", "--capacity", "25%", "--passes", "batch:2")
    level = ("--slo", "ttft=20ms,tpot=2ms")
    ended = moereplay_here(*run, "--arrivals", "poisson:20", *level, "--json")
    found = json.loads(ended.stdout)
    assert found["serving"]["slo_share"] == pytest.approx(1 / 3)
    assert [each["arrival_ns"] for each in found["per_request"]] == sorted(
        each["arrival_ns"] for each in found["per_request"]
    )
    printed = moereplay_here(*run, "--arrivals", "poisson:20", *level, "--out", tmp_path / "out").stdout.replace(
        "\n ", ""
    )
    for said in (
        "goodput/s",
        "tok/s each",
        "tok/s all",
        "SLO: 90% of the requests meet TTFT 20 ms and TPOT 2 ms",
        "p90 and p99 of 6 requests: the slowest one",
        "resident: every expert in fast memory from the start",
    ):
        assert said in printed
    easy = moereplay_here(*run, "--arrivals", "poisson:20", "--slo", "ttft=2s,tpot=100ms").stdout.replace("\n ", "")
    assert "every row: all requests meet TTFT 2 s and TPOT 100 ms" in easy
    stored = csv.DictReader(moereplay_here("sweep", "show", tmp_path / "out", "--csv").stdout.splitlines())
    shown = {name: float(value) for name, value in next(iter(stored)).items() if name in found["serving"]}
    assert {"ttft_p50_ms", "tpot_p99_ms", "e2e_p99_ms", "requests_per_s"} <= shown.keys()
    assert shown == pytest.approx({name: found["serving"][name] for name in shown})
    assert "e2e" in moereplay_here("sweep", "show", tmp_path / "out").stdout
    for more, said in (
        (("--find-rate",), "--find-rate requires --slo"),
        (("--find-rate", *level, "--json"), "cannot be combined with --json"),
        (("--find-rate", *level, "--arrivals", "poisson:2"), "--find-rate cannot be combined with --arrivals"),
        (("--slo", "ttft=1"), "invalid --slo"),
    ):
        refused = moereplay_here(*run, *more)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
