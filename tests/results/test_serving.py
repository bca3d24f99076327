"""Figures of serving: percentiles, latencies from arrival, goodput, the largest rate, and latency against rate."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moereplay.analysis.figures.catalogue import SERVING_FIGURES, draw_all
from moereplay.analysis.figures.catalogue import chart as chart_of
from moereplay.results.errors import ResultError
from moereplay.results.files import to_frame
from moereplay.results.result import Result
from moereplay.results.serving import Level, figures, in_system, parse_level, percentile, rate_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.sweeps.grid import STEPS, largest_rate
from tests.kit.command import moereplay_here
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace

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


def test_requests_in_the_system_are_rate_times_sojourn() -> None:
    """Little's law: 79 ms of sojourn in 60 ms."""
    assert in_system(ROWS) == 79 / 60
    found = replay(TRACE, configure(capacity="50%", passes="batch:2", arrivals="poisson:300")).per_request
    mean = in_system(found)
    assert mean is not None
    figured = figures(found)["requests_per_s"]
    assert figured is not None
    assert mean == pytest.approx(figured * sum(each["end_ns"] - each["arrival_ns"] for each in found) / 8 / 1e9)


def test_a_level_is_read() -> None:
    assert parse_level("ttft=2s,tpot=100ms") == Level({"ttft": 2 * 10**9, "tpot": 10**8}, Fraction(9, 10))
    assert parse_level("e2e=1.5us,share=1") == Level({"e2e": 1500}, Fraction(1))
    assert parse_level("ttft=14ms,share=0.66").holds(ROWS)
    assert not parse_level("ttft=13ms,share=0.9").holds(ROWS)


@every("text", ["", "ttft", "ttft=2", "ttft=0s", "share=0.5", "ttft=1s,ttft=2s", "x=1s", "ttft=1s,share=2", "tpot=1h"])
def test_what_is_no_level_is_refused(text: str) -> None:
    with pytest.raises(ResultError, match=r"invalid --slo .*expected ttft=TIME"):
        parse_level(text)


def run(config: ReplayConfig) -> Result:
    return replay(TRACE, config)


def test_the_largest_rate_holds_and_the_next_does_not() -> None:
    config = configure(capacity="50%", passes="batch:1")
    alone = max(each["end_ns"] - each["start_ns"] for each in run(config).per_request)
    level = Level({"e2e": 2 * alone}, Fraction(9, 10))
    found = largest_rate(run, config, level)
    assert found.bounded
    assert found.rate is not None
    assert found.tried < 15
    assert level.holds(found.result.per_request)
    next_rate = float(f"{found.rate * 10 ** (1 / STEPS):.4g}")
    later = run(config.model_copy(update={"arrivals": f"poisson:{next_rate}"}))
    assert not level.holds(later.per_request)


def test_a_level_that_always_or_never_holds_has_no_rate() -> None:
    config = configure(capacity="50%", passes="batch:2")
    always = largest_rate(run, config, parse_level("e2e=1000s"))
    never = largest_rate(run, config, parse_level("e2e=1ns"))
    assert (always.rate, always.bounded, always.tried) == (None, False, 1)
    assert (never.rate, never.bounded, never.tried) == (None, True, 2)


def test_the_rate_of_a_setting() -> None:
    assert [rate_of(text) for text in ("poisson:2.5", "every:0.25", "every:0", "all", "at:0/1", None)] == [
        2.5,
        4,
        None,
        None,
        None,
        None,
    ]


def test_latency_against_rate_has_a_line_per_capacity() -> None:
    results = [
        replay(TRACE, configure(capacity=capacity, passes="batch:2", arrivals=f"poisson:{rate}"))
        for capacity in ("40%", "80%")
        for rate in (100, 300, 900)
    ]
    frame = to_frame(results, [None] * len(results))
    found = chart_of("latency_by_rate", frame)
    (panel,) = found.panels[0]
    assert [each.name for each in panel.series] == ["40%", "80%"]
    expected = [figures(result.per_request)["ttft_p99_ms"] for result in results]
    assert [point.y for each in panel.series for point in each.points] == expected
    assert [point.x for point in panel.series[0].points] == [100, 300, 900]
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
    assert "goodput/s" in moereplay_here(*run, "--arrivals", "poisson:20", *level, "--out", tmp_path / "out").stdout
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
