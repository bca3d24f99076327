"""Figures of a case: speed, hit rate and time to first token against capacity, and collisions by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from moereplay.analysis.figures.by_capacity import behind, bounds, curve_series, dots_of
from moereplay.analysis.figures.chart import Axis, Chart, Panel, Tick, coinciding, places, spans_a_decade
from moereplay.analysis.figures.facets import joined, lines, phase_names
from moereplay.analysis.metrics import HIGH, LOW, with_layer_ends, with_ratios
from moereplay.analysis.palette import DASHES, SOLID, Look, looks
from moereplay.analysis.report.cases import MOST_SERIES, Case, Material, Run
from moereplay.analysis.report.vega import Figure
from moereplay.results.counters import COUNTERS
from moereplay.results.read import layers
from moereplay.results.settings import OF_CURVES

MOST_POINTS = 200  #: of a curve
LONGEST = 160  #: characters that name lines on one another
FEW_CAPACITIES = 3  #: up to this many have a figure of collisions each
EVERY_DASH = (SOLID, *DASHES)
THIN = (0, (0.5, 1.0))  #: dash of curves behind replays
AGAINST = " against capacity"
#: Figures against capacity: metric -> title, axis, and how to read it.
AGAINST_CAPACITY = {
    "tokens_per_s": (f"Tokens per second{AGAINST}", Axis("tokens/s", "number"), "More is better."),
    "hit_rate": (f"Hit rate{AGAINST}", Axis("hit rate", "share", zero=True), "More is better."),
    "ttft_mean_ms": (f"Time to first token{AGAINST}", Axis("TTFT, ms", "number"), "Less is better; mean."),
}


def figures(at: int, case: Case, runs: Sequence[Run], material: Material) -> list[Figure]:
    """Return the figures that the case has values for. `runs` are its own, best first."""
    drawn = series_looks(case, runs)
    shown = [run for run in runs if run["series"] in drawn]
    found = [_against(f"{metric}-{at}", metric, shown, drawn) for metric in AGAINST_CAPACITY]
    curves = _behind(case, material.curves)
    found = [_with_bounds(each, shown, curves) if each.name.startswith("hit_rate") else each for each in found]
    found = [_of_one_capacity(each, shown) for each in found]
    every = [*found, *_collisions(at, shown, drawn, material)]
    return [_captioned(each, case.left) for each in every if each.points]


def of_curves(material: Material) -> list[Figure]:
    """Return a figure of curves per trace and settings, for results without replays."""
    keys = ["model", "trace", *OF_CURVES]
    groups = material.curves.group_by(keys, maintain_order=True)
    return [_curves_alone(at, dict(zip(keys, named, strict=True)), rows) for at, (named, rows) in enumerate(groups)]


def series_looks(case: Case, runs: Sequence[Run]) -> dict[str, Look]:
    """Return the styles of the best `MOST_SERIES` policy sets, the same in every figure of the case.

    Colour and marker tell eviction policies apart, dashes the other settings.
    """
    names = case.drawn
    drawn = {run["series"]: run for run in reversed(runs) if run["series"] in names}
    evictions = looks(str(run["config"]["eviction"]) for run in drawn.values())
    others = {
        name: str([run["config"].get(line) for line in case.lines if line != "eviction"]) for name, run in drawn.items()
    }
    order = list(dict.fromkeys(others[name] for name in sorted(names)))
    found = {}
    for name in names:
        look = evictions[str(drawn[name]["config"]["eviction"])]
        dash = EVERY_DASH[order.index(others[name]) % len(EVERY_DASH)] if look.dash == SOLID else look.dash
        found[name] = replace(look, dash=dash)
    return found


def percent(run: Run) -> float:
    """Return the capacity of a run, of all expert bytes."""
    return float(str(run["about"]["capacity_forms"]).partition("%")[0])


def _against(name: str, metric: str, runs: Sequence[Run], drawn: Mapping[str, Look]) -> Figure:
    title, axis, note = AGAINST_CAPACITY[metric]
    known = [run for run in runs if run["figures"][metric] is not None]
    rows = _rows(known, metric)
    series = lines(rows, "percent", metric, drawn, "series")
    return Figure(
        name, Chart(title, note=note, x=_capacities(rows["percent"].to_list()), y=axis, panels=[[Panel(series)]])
    )


def _rows(runs: Sequence[Run], metric: str) -> pl.DataFrame:
    """Return runs as the rows that figures draw: their series, capacity, metric and its interval."""
    schema: dict[str, Any] = {"series": pl.String, "identity": pl.String} | dict.fromkeys(
        ("percent", metric, f"{metric}{LOW}", f"{metric}{HIGH}"), pl.Float64
    )
    ends = [run["interval"].get(metric) or {"low": None, "high": None} for run in runs]
    rows = [
        (run["series"], run["identity"], percent(run), run["figures"][metric], end["low"], end["high"])
        for run, end in zip(runs, ends, strict=True)
    ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _capacities(places: Sequence[float]) -> Axis:
    reached = sorted(set(places)) or [1.0]
    scale, ticks = "log" if spans_a_decade(reached) else "linear", [Tick(each, f"{each:g}%") for each in reached]
    return Axis("capacity, of all expert bytes", "number", scale, ticks=ticks, suffix="%")


def _with_bounds(figure: Figure, runs: Sequence[Run], curves: pl.DataFrame) -> Figure:
    """Add bounds and curves behind the points."""
    metrics = ("belady_hit_rate", "compulsory_limit")
    schema: dict[str, Any] = dict.fromkeys(("percent", *metrics), pl.Float64)
    rows = [(percent(run), *(run["figures"][metric] for metric in metrics)) for run in runs]
    thin = [replace(line, look=replace(line.look, dash=THIN)) for line in curve_series(curves, MOST_POINTS)]
    names = {each.name for each in thin}
    found = [bound for bound in bounds(pl.DataFrame(rows, schema=schema, orient="row")) if bound.name not in names]
    return replace(figure, chart=replace(figure.chart, panels=[[Panel([*figure.panel.series, *found, *thin])]]))


def _behind(case: Case, curves: pl.DataFrame) -> pl.DataFrame:
    """Return the curves that hold for some of the case's replays."""
    replays = case.table
    groups = replays.group_by([*OF_CURVES, "miss", "warm", "routing", "prefetch"], maintain_order=True)
    return pl.concat([curves.clear(), *(behind(curves, rows) for _, rows in groups)]).unique(maintain_order=True)


def _curves_alone(at: int, shared: Mapping[str, Any], rows: pl.DataFrame) -> Figure:
    words = ", ".join(f"{name} {value[:12] if name == 'trace' else value}" for name, value in shared.items())
    note = f"{words}. Every whole number of experts, counted in one pass over the demand; nothing is prefetched."
    note = f"{note} {dots_of(rows)}".rstrip()
    series = curve_series(rows, MOST_POINTS)
    x = replace(_capacities([point.x for line in series for point in line.points]), ticks=())
    y = Axis("hit rate", "share", zero=True)
    return Figure(f"curves-{at}", Chart("Hit rate at every capacity", note=note, x=x, y=y, panels=[[Panel(series)]]))


def _of_one_capacity(figure: Figure, runs: Sequence[Run]) -> Figure:
    """Return bars if all replays have one capacity, at which points would lie above one another."""
    if len({point["x"] for point in (*figure.points, *figure.lines)}) != 1:
        return figure
    title = f"{figure.chart.title.removesuffix(AGAINST)}, capacity {runs[0]['config']['capacity']}"
    order = sorted(figure.panel.series, key=lambda each: not each.measured)
    chart = replace(figure.chart, title=title, y=replace(figure.chart.y, zero=True), panels=[[Panel(order)]])
    return replace(figure, chart=chart, as_bars=True)


def _collisions(at: int, runs: Sequence[Run], drawn: Mapping[str, Look], material: Material) -> list[Figure]:
    """Return a figure for each of a few capacities, of decode passes alone if there are any."""
    few = _few(runs)
    identities = [run["identity"] for run in runs if percent(run) in few]
    shown = material.layered(material.frame.filter(pl.col("about").struct.field("identity").is_in(identities)))
    cells = layers(shown)
    phase = "decode" if "decode" in cells["phase"].to_list() else "prefill"
    name = phase_names(shown)[phase]
    rows, ratio = with_ratios(cells.filter(pl.col("phase") == phase)), "collisions_per_miss"
    rows = with_layer_ends(shown, rows.drop_nulls(ratio), ratio, phase)
    rows = rows.select("identity", pl.col("layer").cast(pl.Float64), *(f"{ratio}{end}" for end in ("", LOW, HIGH)))
    found = []
    for number, size in enumerate(few):
        own = [run for run in runs if percent(run) == size]
        names = pl.DataFrame({"identity": [run["identity"] for run in own], "series": [run["series"] for run in own]})
        series = lines(rows.join(names, on="identity"), "layer", ratio, drawn, "series")
        definition = f"Collisions: {COUNTERS['collisions'].definition}."
        chart = Chart(
            f"Collisions per miss by layer, capacity {own[0]['config']['capacity']}, {name}",
            note=f"Less is better. {definition} Layers without a miss have no point.",
            x=Axis("MoE layer", "whole"),
            y=Axis("collisions per miss", "share", zero=True),
            panels=[[Panel(series)]],
        )
        found.append(Figure(f"collisions-{at}-{number}", chart))
    return found


def _few(runs: Sequence[Run]) -> list[float]:
    """Return the smallest capacity, the best run's, and the largest."""
    reached = sorted(set(map(percent, runs)))
    return sorted({reached[0], percent(runs[0]), reached[-1]}) if len(reached) > FEW_CAPACITIES else reached


def _captioned(figure: Figure, left: int) -> Figure:
    """Add notes to the caption: intervals, start of the axis, hidden lines, and what is left out."""
    ends = any("low" in point for point in figure.points)
    thing = ("Thin lines", "bars") if figure.as_bars else ("Vertical bars", "points")
    note = joined(
        figure.chart.note,
        f"{thing[0]}: 95% CI; where they overlap much, {thing[1]} may not differ." if ends else "",
        "" if figure.chart.y.zero else "The axis does not begin at zero.",
        "" if figure.as_bars else _hidden(coinciding(places(figure.panel.series))),
        f"The {MOST_SERIES} best lines of {MOST_SERIES + left:,}; the ranking has the others." if left else "",
    )
    return replace(figure, chart=replace(figure.chart, note=note))


def _hidden(alike: Sequence[Sequence[str]]) -> str:
    named = "; ".join(" = ".join(names) for names in alike)
    if len(named) <= LONGEST:
        return f"On one another: {named}." if named else ""
    return f"{sum(map(len, alike))} lines coincide with others; the table of points lists each."


def summary(figure: Figure) -> str:
    """Describe the figure in words, for readers who cannot see it."""
    title, known = figure.chart.title, [*figure.points, *figure.lines]
    if not known:
        return f"{title}: no points."
    top, bottom = (pick(known, key=lambda point: point["y"]) for pick in (max, min))
    kind = "bars and lines" if figure.as_bars else "lines"
    return (
        f"{title}. {len(figure.panel.series)} {kind}. Highest {_at(figure, top)}; lowest {_at(figure, bottom)}. "
        "The table below it has every point."
    )


def _at(figure: Figure, point: Mapping[str, Any]) -> str:
    x, y = figure.chart.x, figure.chart.y
    where = f"{x.title.partition(',')[0]} {value(x, point['x'])}"
    return f"{value(y, point['y'])} ({point['series']}, {where})"


def value(axis: Axis, number: float) -> str:
    """Return a number of an axis as text."""
    return f"{100 * number:.2f}%" if axis.format == "share" else f"{number:,.4g}{axis.suffix}"
