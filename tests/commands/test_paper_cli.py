"""`moereplay paper`: every figure draws, its numbers are those of an ordinary replay, and what is wrong is refused."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from moereplay.analysis.papers.page import Text, page
from moereplay.analysis.papers.rows import published_frame
from moereplay.policies.grammar import parse
from moereplay.results.chart import Chart
from moereplay.results.result import Result
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.sweeps.papers import PAPERS, PaperFigure, figures_of, planned
from moereplay.traces.files import bundled
from moereplay.traces.schema import Geometry, Request, Trace
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
from tests.kit.tiny_runs import small_trace

#: Of so many replays that they are left to `make test-long`.
LARGE = ("miss_rate_lambda", "cache_size", "cache_aware_routing", "miss_handling")
EVERY = [
    pytest.param(paper, figure, id=f"{paper}-{figure.name}", marks=[pytest.mark.long] * (figure.name in LARGE))
    for paper in PAPERS
    for figure in figures_of(paper)
]
CLOSE = 1e-12  #: of a quotient that polars divides


def part(whole: Request, tokens: int, ids_alone: bool) -> Request:
    """The first tokens of a request, half of them its prompt."""
    rows = slice(0, tokens)
    if ids_alone:
        return Request(whole.chosen[rows], 0)
    assert whole.weights is not None and whole.logits is not None
    look = tuple(each[rows] for each in whole.lookahead)
    return Request(whole.chosen[rows], tokens // 2, whole.weights[rows], whole.logits[rows], look)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first tokens of two requests of the bundled recording."""
    sample = open_trace(bundled(Path("miniature")))
    path = tmp_path_factory.mktemp("papers") / "short.zarr"
    write_trace(path, sample.header, [part(sample.request(each), 16, False) for each in (0, 1)])
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same trace with ids only and without prompts."""
    sample = open_trace(bundled(Path("miniature")))
    header = sample.header.model_copy(update={"lookahead_depth": 0})
    path = tmp_path_factory.mktemp("papers") / "bare.zarr"
    write_trace(path, header, [part(sample.request(0), 16, True)])
    return path


class Drawn:
    """Papers' figures with the published numbers, each drawn when a test first asks for one of its kind."""

    def __init__(self, trace: Path, folder: Path) -> None:
        self._trace, self._folder, self._done = trace, folder, set[tuple[str, bool]]()

    def of(self, paper: str, name: str = "") -> Path:
        """The folder of a paper, with its large figures if the name is of one, else with all others."""
        out, large = self._folder / paper, name in LARGE
        if (paper, large) not in self._done:
            self._done.add((paper, large))
            figures = ",".join(each.name for each in figures_of(paper) if (each.name in LARGE) == large)
            given = ("--out", out, "--published", "--workers", 1, "--figure", figures)
            ended = moereplay("paper", paper, self._trace, *given)
            assert ended.returncode == 0, ended.stderr
            assert all(len(line) <= 80 for line in ended.stdout.splitlines())
        return out


@pytest.fixture(scope="module")
def drawn(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn(short, tmp_path_factory.mktemp("drawn"))


def rows(folder: Path, figure: PaperFigure) -> list[dict[str, str]]:
    with (folder / f"{figure.name}.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["identity"]]


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "figure"), EVERY)
def test_every_figure_is_drawn_with_the_numbers_of_ordinary_replays(
    paper: str, figure: PaperFigure, drawn: Drawn, short: Path
) -> None:
    """The first and the last cell, and one of lower precisions, counted in plain Python from a replay of it alone."""
    for kind in ("png", "svg"):
        assert (drawn.of(paper, figure.name) / f"{figure.name}.{kind}").stat().st_size > 5000
    trace = open_trace(short)
    cells, found = planned(figure, trace).cells, rows(drawn.of(paper, figure.name), figure)
    assert found and all(set(figure.chart.drawn) <= set(row) for row in found)
    for cell in (cells[0], cells[-1], *[cell for cell in cells if cell.config.miss == "cascade"][:1]):
        own = [row for row in found if (row["series"], row["panel"]) == (cell.series, cell.panel)]
        if figure.chart.per == "run":
            own = [row for row in own if row["identity"] == cell.config.identity(trace)]
            assert all(row["x"] == str(cell.x) or same(row["x"], cell.x) for row in own)
        result = replay(trace, cell.config)
        expected = list(counted(figure, trace, result))
        assert figure.chart.per == "run" or [float(row["x"]) for row in own] == [x for x, _ in expected]
        assert len(own) == len(expected) > 0
        for row, (_, values) in zip(own, expected, strict=True):
            assert row["identity"] == cell.config.identity(trace)
            for name, value in values.items():
                shown = float(row[name]) if row[name] else None
                assert shown == (value if value is None else pytest.approx(value, rel=CLOSE)), (name, row)


def same(text: str, x: float | str) -> bool:
    return not isinstance(x, str) and float(text) == x


def counted(figure: PaperFigure, trace: Trace, result: Result) -> Iterator[tuple[float, dict[str, Any]]]:
    """x and values of the rows of a cell."""
    if figure.chart.per == "layer":
        for layer in range(trace.geometry.layers):
            both = [row for row in result.per_layer if row["layer"] == layer]
            misses = sum(row["misses"] for row in both)
            collisions = sum(row["collisions"] for row in both)
            yield layer, {"collisions_per_miss": collisions / misses if misses else None}
    elif figure.chart.per == "lifetime":
        yield from shares(result.totals["lifetime"], trace.geometry.layers)
    else:
        along = {figure.chart.x} - {"x"}
        yield 0, {name: of_run(name, result) for name in along.union(figure.chart.values)}


def shares(lifetimes: Sequence[int], layers: int) -> list[tuple[float, dict[str, Any]]]:
    """Of the copies evicted, those below 2**bucket steps: from the last 0 to the first 1."""
    below = [sum(lifetimes[: bucket + 1]) / sum(lifetimes) for bucket in range(len(lifetimes))]
    first = max((at for at, share in enumerate(below) if share == 0), default=0)
    last = next(at for at, share in enumerate(below) if share == 1)
    return [(2**at / layers, {"share": below[at]}) for at in range(first, last + 1)]


def of_run(name: str, result: Result) -> float | None:
    """A value of a whole run, from its counters."""
    totals, requests = result.totals, result.per_request
    first = [row["ttft_ns"] for row in requests if row["ttft_ns"] is not None]
    passes, decode = (sum(row[each] or 0 for row in requests) for each in ("decode_passes", "decode_ns"))
    found = {
        "collisions": (totals["collisions"], 1),
        "collisions_per_miss": (totals["collisions"], totals["misses"]),
        "hit_rate": (totals["hits"], totals["accesses"]),
        "miss_rate": (totals["misses"], totals["accesses"]),
        "mass_changed": (changed(result), totals["mass"]),
        "mean_variation": (totals["variation"], totals["mass"]),
        "predictor_precision": (totals["predicted_demanded"], totals["predicted"]),
        "predictor_recall": (totals["predicted_demanded"], totals["predictable"]),
        "stall_share": (totals["stall_ns"], totals["time_ns"]),
        "ttft_mean_ms": (sum(first), len(first) * 10**6),
        "tokens_per_s": (passes * 10**9, decode),
    }
    over, under = found[name]
    return over / under if under else None


def changed(result: Result) -> float:
    """Gate weight that did not run as chosen, and that of few bits times the error of its output, 2.4 steps."""
    nested = [result.totals[name] for name in ("mass_kept", "mass_low_precision", "mass_below_second")]
    miss = parse("miss", result.config["miss"])
    errors = [min(2.4 / (2**bits - 1), 1) for bits in miss.policy.bits(miss.params)]
    shares = (above - below for above, below in pairwise([*nested, 0]))
    return result.totals["mass"] - nested[0] + sum(map(mul, errors, shares))


@pytest.mark.slow
def test_a_second_run_replays_nothing_and_writes_the_same_bytes(drawn: Drawn, short: Path) -> None:
    folder = drawn.of("specmd")
    files = {path: path.read_bytes() for path in folder.glob("*.*")}
    ended = moereplay("paper", "specmd", short, "--out", folder, "--published", "--figure", "collisions,table_2")
    assert ended.returncode == 0 and "miniature: 0 replays to do" in ended.stderr
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == files


@pytest.mark.slow
def test_passes_that_are_given_hold_in_every_cell_and_are_named(short: Path, tmp_path: Path) -> None:
    """Results of both schedules are in one folder; the figure has those of the last command alone."""
    figure, trace = figures_of("specmd", "collisions_by_layer")[0], open_trace(short)
    for passes, said in {"recorded": "Prefill and decode", "token": "Prompt tokens (one per pass) and decode"}.items():
        given = ("--figure", "collisions_by_layer,misses", "--out", tmp_path, "--workers", 1, "--passes", passes)
        ended = moereplay("paper", "specmd", short, *given)
        assert ended.returncode == 0 and f"passes {passes}" in " ".join(ended.stdout.split())
        found = rows(tmp_path, figure)
        assert {row["passes"] for row in found} == {passes}
        cells = planned(figure, trace, {"passes": passes}).cells
        assert {row["identity"] for row in found} == {cell.config.identity(trace) for cell in cells}
        assert f"<!-- {said} together." in (tmp_path / "collisions_by_layer.svg").read_text()


def test_bars_are_named_below_and_lines_that_hide_one_another_above(drawn: Drawn) -> None:
    bars = (drawn.of("specmd") / "hit_rate.svg").read_text()
    assert bars.count("<!-- score -->") == 4  # below each of three panels, and in the legend
    assert bars.count("<!-- order=b -->") == 3  # upright, in two lines
    rows = [(series, x, x / 4) for series in ("lru", "fifo", "score") for x in (1.0, 2.0)]
    frame = pl.DataFrame(rows, ("series", "x", "hit_rate"), orient="row").with_columns(
        pl.lit("model").alias("model"),
        pl.lit("digest").alias("trace"),
        pl.lit("").alias("panel"),
        label=pl.lit("SIMULATED"),
    )
    apart = frame.with_columns(pl.col("hit_rate") + (pl.col("series") == "score") * (pl.col("x") - 1) / 10)
    chart = Chart("lines", {"hit_rate": "hit rate"})
    (axes,) = page(chart, Text("title", ""), apart, frame.clear()).axes
    assert [text.get_text() for text in axes.texts] == ["lru = fifo"]


@pytest.mark.slow
def test_published_numbers_stand_beside_ours_on_request_alone(drawn: Drawn, short: Path, tmp_path: Path) -> None:
    with (drawn.of("specmd") / "collisions.csv").open() as file:
        beside = {(row["panel"], row["series"]): row for row in csv.DictReader(file)}
    lru = beside["capacity 5%", "lru"]
    assert (lru["collisions_per_miss published, low"], lru["collisions_per_miss published, high"]) == ("0.045", "0.126")
    assert lru["source"] == "§5.2, at 5 %" and not beside["capacity 1%", "lru"]["source"]
    ended = moereplay("paper", "specmd", short, "--out", tmp_path, "--figure", "collisions", "--workers", 1)
    assert ended.returncode == 0 and "published" not in ended.stdout + (tmp_path / "collisions.csv").read_text()


def test_the_red_part_of_a_bar_has_its_number(drawn: Drawn) -> None:
    (figure,) = figures_of("specmd", "misses")
    for row in rows(drawn.of("specmd"), figure):
        assert 0 <= float(row["collisions_per_access"]) <= float(row["miss_rate"]) <= 1
    assert any(float(row["collisions_per_access"]) for row in rows(drawn.of("specmd"), figure))


@pytest.mark.slow
def test_a_long_table_prints_what_is_published_and_a_mark_of_deep_layers_is_in_the_last(tmp_path: Path) -> None:
    """The paper's mark is of OLMoE, whose last layer is 15; that of this trace is 3."""
    whole = small_trace(Geometry(layers=4, experts=64, k=2, expert_bytes=(1_000_000,) * 4))
    write_trace(tmp_path / "four.zarr", whole.header, map(whole.request, range(whole.requests)))
    given = ("--figure", "collisions_by_layer", "--out", tmp_path / "out", "--workers", 1)
    published = moereplay("paper", "specmd", tmp_path / "four.zarr", "--published", *given)
    assert published.returncode == 0, published.stderr
    assert "60 rows in collisions_by_layer.csv" in " ".join(published.stdout.split())  # 3 capacities, 5 policies
    found = re.findall(r"^capacity 1% +(\w+) +(\d+) .* (0.08 to 0.12)$", published.stdout, re.MULTILINE)
    assert found == [(series, "3", "0.08 to 0.12") for series in ("lru", "score")]
    without = moereplay("paper", "specmd", tmp_path / "four.zarr", *given)
    assert "collisions_by_layer.csv" in without.stdout and "lru" not in without.stdout


def paper_page(chart: Chart, published: Sequence[dict[str, Any]] = (), **columns: Sequence[Any]) -> Figure:
    """A page of rows that no replay made."""
    place = {"model": "toy", "trace": "0123", "panel": ""}
    series = [f"s{number}" for number in range(len(next(iter(columns.values()))))]
    rows = pl.DataFrame({"series": series, "x": series, "label": "SIMULATED"} | place | columns)
    return page(chart, Text("Title", ""), rows, published_frame([dict(mark) | place for mark in published], rows))


def test_a_number_stands_above_a_mark_that_would_cover_it() -> None:
    """The bar of 1 % ends just below the mark from 1.6 to 1.9 %; that of 10 % ends well below its own, as before."""
    marks = [
        {
            "value": "collisions_per_miss",
            "series": series,
            "x": series,
            "low": low,
            "high": high,
            "of": "",
            "source": "",
        }
        for series, low, high in (("s0", 0.016, 0.019), ("s1", 0.42, 0.6))
    ]
    chart = Chart("bars", {"collisions_per_miss": "collisions per miss"})
    figure = paper_page(chart, marks, collisions_per_miss=[0.01, 0.1, 0.8])
    numbers = {each.get_text(): each.xy[1] for each in figure.axes[0].texts if isinstance(each, Annotation)}
    assert {name: numbers[name] for name in ("1.0", "10", "80")} == {"1.0": 0.019, "10": 0.1, "80": 0.8}


@every("lowest, from_zero", [(0.42, False), (0.2, True)])
def test_two_rates_that_lie_close_together_have_an_axis_of_their_own(lowest: float, from_zero: bool) -> None:
    chart = Chart("lines", {"hit_rate": "hit rate"}, x="stall_share")
    figure = paper_page(chart, hit_rate=[lowest, 0.6], stall_share=[0.6, 0.7])
    assert (figure.axes[0].get_ylim()[0] == 0) == from_zero


def test_a_ratio_is_that_of_two_rows(drawn: Drawn) -> None:
    (figure,) = figures_of("specmd", "collision_ratio")
    found = {(row["panel"], row["series"]): row for row in rows(drawn.of("specmd"), figure)}
    assert {float(row["relative_collisions"]) for (_, series), row in found.items() if series == "least_stale"} <= {1}
    one, base = found["capacity 5%", "lru"], found["capacity 5%", "least_stale"]
    assert float(one["relative_collisions"]) == float(one["collisions"]) / float(base["collisions"])


@pytest.mark.parametrize("paper", PAPERS)
def test_the_list_has_every_figure_with_what_it_needs(paper: str) -> None:
    ended = moereplay("paper", paper, "--list")
    listed = [line.split()[0] for line in ended.stdout.splitlines() if line and not line.startswith((" ", "all:"))]
    assert (ended.returncode, ended.stderr) == (0, "")
    assert listed == [figure.name for figure in figures_of(paper)]
    assert ended.stdout.count("needs:") == len(listed)


@pytest.mark.slow
def test_a_trace_of_ids_alone_says_what_it_does_not_allow(bare: Path, tmp_path: Path) -> None:
    figures = "hit_rate,overfetch,table_1,cache_aware_routing"
    ended = moereplay("paper", "specmd", bare, "--out", tmp_path, "--figure", figures, "--workers", 1)
    assert ended.returncode == 0, ended.stderr
    for figure, lacking in {
        "overfetch, table_1": "not drawn .*miniature.* lookahead.*record .*--look-ahead",
        "cache_aware_routing": "not drawn .*miniature.* logits",
        "hit_rate": "miniature without score.* weights",
    }.items():
        assert re.search(rf"^.*{figure}: {lacking}", ended.stderr, re.MULTILINE), ended.stderr
    assert {path.stem for path in tmp_path.glob("*.png")} == {"hit_rate"}
    with (tmp_path / "hit_rate.csv").open() as file:
        assert {row["series"] for row in csv.DictReader(file)} >= {"lru", "least_stale"}


@every(
    "arguments, said",
    [
        (("specmd",), "moereplay paper specmd miniature"),
        (("specmdd", "miniature"), "unknown paper 'specmdd': did you mean specmd?"),
        (("specmd", "miniature", "--figure", "colision"), "unknown figure of specmd 'colision': did you mean"),
        (("specmd", "none.zarr"), "none.zarr"),
        (("specmd", "miniature", "--passes", "tokens"), "unknown passes 'tokens': did you mean token?"),
        (("specmd", "miniature", "--live", "none.json"), "--live none.json: No such file"),
        (("specmd", "miniature", "--out", "-"), "standard output"),
    ],
    apart=True,
)
def test_what_cannot_be_drawn_is_refused_in_a_line(arguments: Sequence[str], said: str, tmp_path: Path) -> None:
    ended = moereplay("paper", *arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_figure_that_a_trace_allows_is_an_error(bare: Path, tmp_path: Path) -> None:
    ended = moereplay("paper", "specmd", bare, "--figure", "table_2", "--out", tmp_path / "out")
    assert ended.returncode == 2 and "none of table_2" in ended.stderr
    assert not (tmp_path / "out").exists()


def live(config: ReplayConfig, trace: Trace, perplexity: float) -> str:
    """Return the output of `live --json` for a configuration."""
    document = replay(trace, config).to_json()
    return json.dumps(document | {"quality": {"total": {"perplexity": perplexity, "perplexity_base": 8.0}}})


@pytest.mark.slow
def test_perplexity_of_live_runs_stands_beside_their_replays(short: Path, drawn: Drawn, tmp_path: Path) -> None:
    (figure,) = figures_of("cache-conditional", "rank_sensitivity")
    trace = open_trace(short)
    cell = planned(figure, trace).cells[1]
    config = configure(**cell.config.model_dump() | {"passes": "recorded", "reset": "never"})
    (tmp_path / "live.json").write_text(live(config, trace, 10.0))
    out = drawn.of("cache-conditional")
    given = ("--figure", figure.name, "--live", tmp_path / "live.json")
    ended = moereplay("paper", "cache-conditional", short, "--out", out, *given)
    assert ended.returncode == 0, ended.stderr
    found = {(row["series"], float(row["x"])): row["perplexity_change"] for row in rows(out, figure)}
    assert found.pop((cell.series, float(cell.x))) == "0.25"
    assert set(found.values()) == {""}
