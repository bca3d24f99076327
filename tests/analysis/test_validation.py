"""Live beside replayed: a disagreement is found at its place, numbers equal those worked out by hand, files hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from moereplay.analysis.figures.catalogue import VALIDATION_FIGURES, draw, draw_all
from moereplay.analysis.figures.drawing import styled
from moereplay.analysis.validation import (
    Comparison,
    Divergence,
    Measure,
    Runs,
    Tolerances,
    compare,
    document,
    first_choice,
    first_divergence,
    heading,
    lines,
    measure_rows,
    quality_rows,
    to_frame,
)
from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.files import write_frame
from moereplay.results.result import Event, Result, Row
from moereplay.results.settings import setting_kinds
from moereplay.results.validation import FILE, load
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.every import every
from tests.kit.tiny_runs import NO_COUNT, NO_TIME, small_trace

LRU = configure(capacity="25%")


@cache
def shared_trace() -> Trace:
    """Two requests of 4 + 24 tokens, four layers of eight experts, two active."""
    return small_trace()


@pytest.fixture
def trace() -> Trace:
    return shared_trace()


def altered(trace: Trace, request: int, token: int, layer: int) -> Trace:
    """Change the first expert of one token in one layer."""
    rows = [trace.request(index) for index in range(trace.requests)]
    chosen = rows[request].chosen.copy()
    chosen[token, layer, 0] = min(set(range(trace.geometry.experts)) - set(chosen[token, layer].tolist()))
    rows[request] = replace(rows[request], chosen=chosen)
    return memory_trace(trace.header, rows, trace.router_bias)


def result(
    counts: Row = {},  # noqa: B006 - it is not changed
    events: Sequence[Event] = (),
    label: str = "SIMULATED",
    requests: Sequence[Row] = (),
) -> Result:
    """A run that never was; what is not given is zero."""
    config = LRU.model_dump(mode="json")
    about = {"label": label, "policies": LRU.spelled_out()}
    layer = {"layer": 0, "phase": "decode", "lifetime": []} | NO_COUNT | counts
    rows = [{"request": at} | NO_TIME | NO_COUNT | row for at, row in enumerate(requests)]
    return Result(config, setting_kinds(), NO_COUNT | {"time_ns": 0} | counts, [layer], rows, about, list(events))


def apart(trace: Trace, ours: list[Event], theirs: list[Event]) -> Divergence:
    found = first_divergence(result(events=ours), result(events=theirs), trace)
    assert found
    return found


# Where two runs part


@settings(max_examples=30, deadline=None)
@given(request=st.integers(0, 1), token=st.integers(0, 27), layer=st.integers(0, 3))
def test_a_changed_choice_is_found_at_its_request_token_and_layer(request: int, token: int, layer: int) -> None:
    trace = shared_trace()
    found = first_choice(altered(trace, request, token, layer), trace, "recorded")
    assert found and (found.request, found.tokens, found.layer) == (request, (token, token + 1), layer)
    # the prompt's four tokens are one pass; each request has 1 + 24 passes
    assert found.step_pass == request * 25 + max(0, token - 3)


@every("request_, token, layer", [(0, 0, 3), (0, 4, 0), (1, 17, 2), (1, 27, 3)])
def test_a_changed_demand_is_found_in_the_events_at_its_pass_and_layer(
    trace: Trace, request_: int, token: int, layer: int
) -> None:
    live = replay(altered(trace, request_, token, layer), LRU, log=True)
    found = first_divergence(live, replay(trace, LRU, log=True), trace)
    assert found and (found.request, found.layer) == (request_, layer)
    assert found.tokens == ((0, 4) if token < 4 else (token, token + 1))
    assert found.step_pass == request_ * 25 + max(0, token - 3)


def test_within_a_pass_the_earlier_layer_comes_first(trace: Trace) -> None:
    # tokens 0 and 3 go through layer 0 together, before layer 1 sees either
    both = altered(altered(trace, 0, 0, 1), 0, 3, 0)
    found = first_choice(both, trace, "recorded")
    assert found and (found.tokens, found.layer) == ((3, 4), 0)
    one_by_one = first_choice(both, trace, "token")
    assert one_by_one and (one_by_one.tokens, one_by_one.layer) == ((0, 1), 1)


def test_runs_of_other_requests_differ_in_their_size(trace: Trace) -> None:
    half = memory_trace(trace.header, [trace.request(0)], trace.router_bias)
    found = first_choice(half, trace, "recorded")
    assert found and (found.live, found.replayed) == ("(28, 4, 2)", "(56, 4, 2)")


def test_a_run_does_not_differ_from_itself(trace: Trace) -> None:
    assert first_divergence(replay(trace, LRU, log=True), replay(trace, LRU, log=True), trace) is None


def test_a_demanded_expert_is_told_apart_from_how_it_was_served(trace: Trace) -> None:
    # pass 27 is request 1's third, its token 5: the first pass holds tokens 0 to 3
    hit = Event(10, 10, "hits", 27, 2, 5, 0, "gate")
    other = apart(trace, [hit], [replace(hit, kind="capacity", expert=6)])
    assert other.text() == (
        "request 1, token 5, pass 27, layer 2: the demanded expert differs: "
        "live hits expert 5 (gate) at 10 ns; replayed capacity expert 6 (gate) at 10 ns"
    )
    served = apart(trace, [hit], [replace(hit, kind="capacity")])
    assert served.what == "kind"


def test_the_earlier_of_two_places_is_named(trace: Trace) -> None:
    begun = Event(0, 5, "dense", 0, 0, -1, 0, "compute")
    one, two = Event(5, 7, "dense", 1, 0, -1, 0, "compute"), Event(5, 5, "evict", 0, 3, 2, 0, "for 7")
    found = apart(trace, [begun, one], [begun, two])
    assert (found.what, found.step_pass, found.layer, found.tokens) == ("pass", 0, 3, (0, 4))
    assert found.live == "dense (compute) in pass 1, layer 0 at 5-7 ns"


def test_a_log_that_ends_early_is_a_difference(trace: Trace) -> None:
    events = [Event(at, at, "hits", at, 0, 1, 0, "gate") for at in range(3)]
    found = apart(trace, events, events[:2])
    assert (found.what, found.replayed, found.step_pass) == ("the end of the log", "nothing more", 2)


def test_the_same_events_at_another_time_are_a_difference_of_time(trace: Trace) -> None:
    event = Event(3, 8, "transfer", 4, 1, 2, 0, "demand")
    assert apart(trace, [event], [replace(event, t1=9)]).what == "time"


@every("name", COUNTERS)
def test_no_counter_may_differ_behind_equal_events(trace: Trace, name: str) -> None:
    found = first_divergence(result(), result({name: 1}), trace)
    assert found and found.text() == f"layer 0: {name} (decode) differs: live 0; replayed 1"


def test_times_of_requests_and_of_the_run_count_too(trace: Trace) -> None:
    late = first_divergence(result(requests=[{}, {}]), result(requests=[{}, {"end_ns": 4}]), trace)
    assert late and late.text() == "request 1: end_ns differs: live 0; replayed 4"
    total = first_divergence(result(), replace(result(), totals=result().totals | {"time_ns": 4}), trace)
    assert total and total.text() == "in total: time_ns differs: live 0; replayed 4"


# Numbers and verdicts


def by_hand(hits: int, ttft: int, decode: int) -> Result:
    """100 accesses; two requests, the second without a prompt; 10 decode passes."""
    times = {"decode_ns": decode // 2, "decode_tokens": 5}
    requests = [{"ttft_ns": ttft, **times}, times]
    counts = {"accesses": 100, "hits": hits, "misses": 100 - hits, "collisions": 3, "bytes_demand": 2_000_000}
    return result(counts, label="SIMULATED, open-loop", requests=requests)


def test_measures_are_those_of_the_hand(trace: Trace) -> None:
    # live: 60 of 100 hit; 4 ms to the first token; 20 ms / 10 passes. replayed: 62 of 100; 4.2 ms; 19 ms / 10
    found = compare("x", Runs(by_hand(60, 4_000_000, 20_000_000), by_hand(62, 4_200_000, 19_000_000)), trace)
    numbers = {measure.name: (measure.live, measure.replayed, measure.error) for measure in found.measures}
    assert numbers["hit rate"] == (0.60, 0.62, pytest.approx(0.02))
    assert numbers["TTFT ms"] == (4.0, 4.2, pytest.approx(0.05))
    assert numbers["TPOT ms"] == (2.0, 1.9, pytest.approx(-0.05))
    assert numbers["collisions"] == (3, 3, 0)
    assert numbers["GB moved"] == (0.002, 0.002, 0)
    assert (found.layers[0]["live_misses"], found.layers[0]["replayed_misses"]) == (40, 38)


@every(
    "hit_rate, time, wrong",
    [
        (0.03, 0.06, []),
        (0.01, 0.06, ["hit rate is outside its tolerance of 0.01"]),
        (0.03, 0.04, [f"{name} is outside its tolerance of 0.04" for name in ("TTFT ms", "TPOT ms")]),
    ],
)
def test_tolerances_decide_an_open_loop(trace: Trace, hit_rate: float, time: float, wrong: list[str]) -> None:
    # errors as above: 0.02 of hit rate, 5 % of either time
    runs = Runs(by_hand(60, 4_000_000, 20_000_000), by_hand(62, 4_200_000, 19_000_000))
    found = compare("x", runs, trace, Tolerances(hit_rate=hit_rate, time=time))
    assert found.complaints() == wrong
    assert found.verdict() == ("outside tolerance" if wrong else "within tolerance")


def test_policies_that_leave_the_output_alone_are_allowed_no_difference(trace: Trace) -> None:
    # one access in 224 is far below 0.01, and still wrong
    runs = [replay(each, LRU, log=True) for each in (altered(trace, 1, 17, 2), trace)]
    found = compare("lru", Runs(runs[0], runs[1]), trace)
    assert (found.exact, found.passed, found.verdict()) == (True, False, "differs")
    assert found.complaints()[0].startswith("request 1, token 17, pass 39, layer 2: ")
    assert compare("lru", Runs(runs[0], runs[0]), trace).verdict() == "identical"


def test_the_closed_loop_may_not_differ_whatever_the_policies(trace: Trace) -> None:
    prior = configure(capacity="25%", routing="cache_prior")
    runs = [replay(each, prior, log=True) for each in (trace, logits_moved(trace))]
    found = compare("prior", Runs(runs[0], runs[0], runs[1]), trace, Tolerances(hit_rate=1, time=1))
    assert (found.exact, found.passed, found.verdict()) == (False, False, "differs")
    assert found.complaints()[0].startswith("closed loop: request 1, token 4")
    assert "closed loop identical" in lines([compare("prior", Runs(runs[0], runs[0], runs[0]), trace)])[0]


def logits_moved(trace: Trace) -> Trace:
    """From the second request's first decoded token on, every expert scores as its neighbour did."""
    rows = [trace.request(index) for index in range(trace.requests)]
    assert rows[1].logits is not None
    logits = rows[1].logits.copy()
    logits[4:] = np.roll(logits[4:], 1, axis=-1)
    return memory_trace(trace.header, [rows[0], replace(rows[1], logits=logits)], trace.router_bias)


def test_a_number_that_only_one_run_has_is_outside() -> None:
    assert not Measure("TTFT ms", 1.0, None, relative=True, allowed=0.5).within
    assert not Measure("TPOT ms", 0.0, 1.0, relative=True, allowed=0.5).within
    assert Measure("TTFT ms", None, None, relative=True, allowed=0.0).within
    assert Measure("collisions", 1, 900).within


def test_runs_of_different_configurations_are_not_compared(trace: Trace) -> None:
    runs = Runs(replay(trace, LRU), replay(trace, configure(capacity="50%")))
    with pytest.raises(ResultError, match="lru: the runs have different configurations"):
        compare("lru", runs, trace)


# Tables, documents, files


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    """Standard routing that agrees, and three strengths of cache-aware routing that do not quite."""
    trace = shared_trace()
    moved = logits_moved(trace)
    priors = {f"prior {lam}": configure(routing=f"cache_prior:lam={lam}", capacity="25%") for lam in (0, 0.3, 1)}
    found = []
    for name, config in {"lru": LRU, **priors}.items():
        live = replay(moved, config, log=True)
        baseline = live if name == "lru" else replay(trace, config, log=True)
        quality = {"tokens": 54, "perplexity_base": 50.0, "perplexity": 51.5, "mean_kl": 0.01, "top1": 0.9}
        found.append(compare(name, Runs(live, baseline, live), trace, None, quality))
    return found


def test_a_table_has_a_row_per_set_and_measure(comparisons: list[Comparison]) -> None:
    rows = measure_rows(comparisons)
    assert [row["what"] for row in rows[:5]] == ["hit rate", "collisions", "GB moved", "TTFT ms", "TPOT ms"]
    assert [row["set"] for row in rows if row["set"]] == [each.name for each in comparisons]


def test_the_words_of_a_long_name_go_down_its_rows(comparisons: list[Comparison]) -> None:
    long = replace(comparisons[0], name="capacity=5% eviction=lru prefetch=none")
    assert [row["set"] for row in measure_rows([long])] == ["capacity=5%", "eviction=lru", "prefetch=none", "", ""]


def test_the_heading_says_once_what_all_sets_share_and_names_what_a_name_does_not(
    comparisons: list[Comparison], trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = comparisons[0]
    config = first.config | {"eviction": "fifo", "prefetch": "top_k"}
    other = replace(first, name="eviction=fifo", config=config)
    lines = heading(trace, [first, other])
    assert sum("platform a100-5gbps" in line for line in lines) == 1
    assert "set eviction=fifo: prefetch top_k" in lines
    assert not any("recorded with drafts" in line for line in lines)
    monkeypatch.setitem(vars(trace), "verified", ())
    assert any("recorded with drafts" in line for line in heading(trace, [first, other]))


def test_quality_is_told_of_sets_that_change_it(comparisons: list[Comparison]) -> None:
    rows = quality_rows(comparisons)
    assert [row["lam"] for row in rows] == [0, 0.3, 1]
    layers = comparisons[2].layers
    misses, accesses = (sum(layer[f"live_{name}"] for layer in layers) for name in ("misses", "accesses"))
    assert rows[1]["miss rate live"] == misses / accesses


def test_the_document_is_json_and_says_where_runs_part(comparisons: list[Comparison]) -> None:
    told = json.loads(json.dumps(document(comparisons), allow_nan=False))
    assert told["passed"] == all(each.passed for each in comparisons)
    lru, unlifted, *lifted = told["sets"]
    assert (lru["verdict"], lru["open_loop"]) == ("identical", None)
    assert unlifted["open_loop"] is None  # lam = 0 chooses as recorded, whatever the logits
    assert {each["open_loop"]["request"] for each in lifted} == {1}
    assert all("tokens" in each["open_loop"] and "tokens scored" not in each["open_loop"] for each in lifted)


def test_a_file_comes_back_as_it_was_and_a_changed_number_does_not(
    comparisons: list[Comparison], tmp_path: Path
) -> None:
    frame = to_frame(comparisons)
    write_frame(frame, tmp_path / FILE)
    assert load(tmp_path).equals(frame)
    write_frame(frame.with_columns(pl.lit("identical").alias("verdict")), tmp_path / FILE)
    with pytest.raises(ResultError, match="does not match its digest; delete it and validate again"):
        load(tmp_path)
    with pytest.raises(ResultError, match="no validation in"):
        load(tmp_path / "elsewhere")


def test_a_foreign_file_is_named(comparisons: list[Comparison], tmp_path: Path) -> None:
    write_frame(to_frame(comparisons).drop("quality"), tmp_path / FILE)
    with pytest.raises(ResultError, match=r"quality\.tokens is missing"):
        load(tmp_path)


# Figures


def drawn(figure: Figure, panel: int) -> dict[str, list[float]]:
    return {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in figure.axes[panel].get_lines()}


def test_every_set_has_a_panel_with_both_miss_rates(comparisons: list[Comparison]) -> None:
    figure = draw("validation", to_frame(comparisons))
    assert len(figure.axes) == len(comparisons)
    for panel, each in enumerate(comparisons):
        for side in ("live", "replayed"):
            rates = [layer[f"{side}_misses"] / layer[f"{side}_accesses"] for layer in each.layers]
            assert drawn(figure, panel)[side] == rates


def test_the_error_is_drawn_against_lambda(comparisons: list[Comparison]) -> None:
    figure = draw("open_loop_error", to_frame(comparisons))
    rates, errors, perplexities = (drawn(figure, panel) for panel in range(3))
    assert np.asarray(figure.axes[0].get_lines()[0].get_xdata()).tolist() == [0, 0.3, 1]
    gaps = [100 * (theirs - ours) for ours, theirs in zip(rates["live"], rates["replayed"], strict=True)]
    assert errors["replayed - live"] == pytest.approx(gaps)
    assert perplexities["live"] == pytest.approx([3.0] * 3)  # 51.5 of 50


def test_figures_say_what_they_need(comparisons: list[Comparison]) -> None:
    one = to_frame(comparisons[:2])
    assert [name for name, _ in draw_all(one).figures] == ["validation"]
    assert draw_all(one).left_out["open_loop_error"].startswith("needs two lambdas or more of one policy set; validate")
    assert tuple(name for name, _ in draw_all(to_frame(comparisons)).figures) == tuple(VALIDATION_FIGURES)
    with pytest.raises(ResultError, match="needs two lambdas or more of one policy set"):
        draw("open_loop_error", one)
    with pytest.raises(ResultError, match="20 policy sets do not fit a page of 8 panels"):
        draw("validation", to_frame(comparisons * 5))
    with pytest.raises(ResultError, match="unknown figure 'misses'"):
        draw("misses", one)


@every("count, name", product([3, 4], VALIDATION_FIGURES))
def test_texts_stay_on_the_page_and_off_each_other(comparisons: list[Comparison], name: str, count: int) -> None:
    figure = draw(name, to_frame(comparisons[-count:]))
    with styled():
        figure.draw_without_rendering()
    blocks = [text.get_window_extent() for text in (*figure.texts, *figure.legends) if text.get_visible()]
    panels = [box for axes in figure.axes if (box := axes.get_tightbbox()) is not None]
    boxes = [box for box in blocks if box.width > 1] + panels
    assert not [box for box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1]
    assert not [(a, b) for at, a in enumerate(boxes) for b in boxes[:at] if a.overlaps(b)]
    assert len(panels) == len(figure.axes)
