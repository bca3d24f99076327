"""The figures of a case: speed, hit rate and time to the first token against capacity, and collisions by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from moereplay.analysis.figures.capacities import behind as beside
from moereplay.analysis.metrics import with_ratios
from moereplay.analysis.palette import look_of
from moereplay.analysis.report.bars import Bars
from moereplay.analysis.report.cases import Case, Material, Run
from moereplay.analysis.report.figure import BELADY, COMPULSORY, MOST, Axis, Figure, Series, coinciding, series
from moereplay.results.counters import COUNTERS
from moereplay.results.read import layers
from moereplay.results.settings import OF_CURVES

DECADE = 10  #: capacities that span more than this are shown on a logarithmic axis
MOST_POINTS = 200  #: of a curve
#: What intervals look like in a figure of points, and in one of bars.
INTERVALS = (
    "Vertical bars: 95% intervals; where they overlap much, points may not differ.",
    "Thin lines: 95% intervals; where they overlap much, bars may not differ.",
)
LONGEST = 160  #: characters that name lines on one another
FEW_CAPACITIES = 3  #: as many have a figure of collisions each
AGAINST = " against capacity"
#: Of figures against capacity: the metric, the title, the axis, and what a reader must know.
AGAINST_CAPACITY = (
    ("tokens_per_s", f"Tokens per second{AGAINST}", Axis("tokens/s", "number"), "More is better."),
    ("hit_rate", f"Hit rate{AGAINST}", Axis("hit rate", "share", zero=True), "More is better."),
    ("ttft_mean_ms", f"Time to first token{AGAINST}", Axis("TTFT, ms", "number"), "Less is better; mean."),
)


def figures(at: int, case: Case, runs: Sequence[Run], material: Material) -> list[Figure]:
    """Those that the case has figures for. `runs` are its own, best first."""
    drawn = series(case, runs)
    shown = [run for run in runs if run["series"] in {each.name for each in drawn}]
    found = [_against(at, metric, (title, axis, note), shown, drawn) for metric, title, axis, note in AGAINST_CAPACITY]
    hits = next(number for number, figure in enumerate(AGAINST_CAPACITY) if figure[0] == "hit_rate")
    found[hits] = _with_bounds(found[hits], shown, _behind(case, material.curves))
    found = [_of_one_capacity(each, shown) for each in found]
    every = [*found, *_collisions(at, case, shown, drawn, material.frame)]
    left = len({run["series"] for run in runs}) - len(drawn)
    return [_worded(each, left) for each in every if each.points]


def of_curves(material: Material) -> list[Figure]:
    """Hit rate at every capacity, a figure for each trace and way of replaying it, where there are no replays."""
    keys = ["model", "trace", *OF_CURVES]
    panels = material.curves.group_by(keys, maintain_order=True)
    return [_curves_alone(at, dict(zip(keys, named, strict=True)), rows) for at, (named, rows) in enumerate(panels)]


def percent(run: Run) -> float:
    """Its capacity of all expert bytes."""
    return float(str(run["about"]["capacity_forms"]).partition("%")[0])


def _against(
    at: int, metric: str, worded: tuple[str, Axis, str], runs: Sequence[Run], drawn: Sequence[Series]
) -> Figure:
    title, axis, note = worded
    points = [
        {"x": percent(run), "y": run["figures"][metric], "series": run["series"], "identity": run["identity"]}
        | _ends(run, metric)
        for run in runs
        if run["figures"][metric] is not None
    ]
    return Figure(f"{metric}-{at}", title, note, _capacities(points), axis, points, drawn)


def _ends(run: Run, metric: str) -> dict[str, float]:
    """Of the interval, where there is one."""
    found = run["interval"].get(metric)
    return {"low": found["low"], "high": found["high"]} if found else {}


def _capacities(points: Sequence[Mapping[str, Any]]) -> Axis:
    reached = sorted({point["x"] for point in points}) or [1.0]
    log = reached[-1] > DECADE * reached[0]
    title = f"capacity, of all expert bytes{' (log)' if log else ''}"
    return Axis(title, "number", log=log, ticks=reached if len(reached) <= 8 else (), suffix="%")


def _with_bounds(figure: Figure, runs: Sequence[Run], curves: pl.DataFrame) -> Figure:
    """Belady's bound and the compulsory limit behind the points, the highest of a capacity, and curves."""
    lines = [
        {"x": x, "y": y, "series": each.name}
        for metric, each in (("belady_hit_rate", BELADY), ("compulsory_limit", COMPULSORY))
        for x, y in _highest(runs, metric)
    ]
    bounds = [each for each in (BELADY, COMPULSORY) if any(line["series"] == each.name for line in lines)]
    lines += _curve_points(curves)
    return figure._replace(series=[*figure.series, *bounds, *_curve_series(curves)], lines=lines)


def _highest(runs: Sequence[Run], metric: str) -> list[tuple[float, float]]:
    found: dict[float, float] = {}
    for run in runs:
        if (value := run["figures"][metric]) is not None:
            found[percent(run)] = max(value, found.get(percent(run), 0.0))
    return sorted(found.items())


def _behind(case: Case, curves: pl.DataFrame) -> pl.DataFrame:
    """The curves that hold for some of the case's replays, by the rules of a sweep's own figures."""
    replays = pl.DataFrame(case.rows, infer_schema_length=None)
    panels = replays.group_by([*OF_CURVES, "miss", "warm", "routing", "prefetch"], maintain_order=True)
    return pl.concat([curves.clear(), *(beside(curves, rows) for _, rows in panels)]).unique(maintain_order=True)


def _curve_series(curves: pl.DataFrame, dash: Sequence[float] = (1, 2)) -> list[Series]:
    looks = {_of_curve(curves, row): look_of(row["policy"]).colour for row in curves.iter_rows(named=True)}
    return [Series(name, looks[name], "", dash) for name in sorted(looks)]


def _of_curve(curves: pl.DataFrame, row: Mapping[str, Any]) -> str:
    """A curve by its policy, and by what else tells it from the others."""
    unlike = "".join(f", {name} {row[name]}" for name in OF_CURVES if curves[name].n_unique() > 1)
    return f"{row['policy']} at every capacity{unlike}"


def _curve_points(curves: pl.DataFrame) -> list[dict[str, Any]]:
    """Thinned, so that a page stays small."""
    found = []
    for _, rows in curves.drop_nulls("hit_rate").group_by("identity", maintain_order=True):
        thin = rows.gather_every(max(1, len(rows) // MOST_POINTS))
        found += [
            {"x": row["percent"], "y": row["hit_rate"], "series": _of_curve(curves, row)}
            for row in thin.iter_rows(named=True)
        ]
    return found


def _curves_alone(at: int, shared: Mapping[str, Any], rows: pl.DataFrame) -> Figure:
    points = [point | {"identity": ""} for point in _curve_points(rows)]
    words = ", ".join(f"{name} {value[:12] if name == 'trace' else value}" for name, value in shared.items())
    caption = f"{words}. Every whole number of experts, counted in one pass over the demand; nothing is prefetched."
    y = Axis("hit rate", "share", zero=True)
    x, drawn = _capacities(points), _curve_series(rows, ())
    return Figure(f"curves-{at}", "Hit rate at every capacity", caption, x, y, (), drawn, points)


def _of_one_capacity(figure: Figure, runs: Sequence[Run]) -> Figure:
    """Return bars where all replays have one capacity, at which points would lie above one another."""
    if len({point["x"] for point in (*figure.points, *figure.lines)}) != 1:
        return figure
    title = f"{figure.title.removesuffix(AGAINST)}, capacity {runs[0]['config']['capacity']}"
    return Bars(*figure)._replace(title=title, y=figure.y._replace(zero=True))


def _collisions(at: int, case: Case, runs: Sequence[Run], drawn: Sequence[Series], frame: pl.DataFrame) -> list[Figure]:
    """A figure for each of a few capacities; of decode passes alone where there are any."""
    cells = layers(frame).filter(pl.col("identity").is_in([run["identity"] for run in runs]))
    phase = "decode" if "decode" in cells["phase"].to_list() else "prefill"
    rows = with_ratios(cells.filter(pl.col("phase") == phase)).drop_nulls("collisions_per_miss")
    return [
        _of_capacity(f"collisions-{at}-{number}", [run for run in runs if percent(run) == size], drawn, rows, phase)
        for number, size in enumerate(_few(runs))
    ]


def _few(runs: Sequence[Run]) -> list[float]:
    """The smallest capacity, that of the best run, and the largest."""
    reached = sorted(set(map(percent, runs)))
    return sorted({reached[0], percent(runs[0]), reached[-1]}) if len(reached) > FEW_CAPACITIES else reached


def _of_capacity(name: str, runs: Sequence[Run], drawn: Sequence[Series], rows: pl.DataFrame, phase: str) -> Figure:
    wanted = {run["identity"]: run["series"] for run in runs}
    found = rows.filter(pl.col("identity").is_in(list(wanted))).sort("identity", "layer").iter_rows(named=True)
    points = [
        {"x": row["layer"], "y": row["collisions_per_miss"], "series": wanted[row["identity"]]}
        | {"identity": row["identity"]}
        for row in found
    ]
    title = f"Collisions per miss by layer, capacity {runs[0]['config']['capacity']}, {phase}"
    caption = f"Less is better. Collisions: {COUNTERS['collisions'].definition}. Layers without a miss have no point."
    x, y = Axis("MoE layer", "whole"), Axis("collisions per miss", "share", zero=True)
    return Figure(name, title, caption, x, y, points, drawn)


def _worded(figure: Figure, left: int) -> Figure:
    """The caption with what is not drawn, what hides what, and where the axis begins."""
    places = ((point["series"], point["x"], point["y"]) for point in figure.points)
    hidden = "" if isinstance(figure, Bars) else _hidden(coinciding(places))
    ends = any("low" in point for point in figure.points)
    said = [
        figure.caption,
        *([INTERVALS[isinstance(figure, Bars)]] if ends else []),
        *(["The axis does not begin at zero."] if not figure.y.zero else []),
        *([hidden] if hidden else []),
        *([f"The {MOST} best lines of {MOST + left:,}; the ranking has the others."] if left else []),
    ]
    used = {point["series"] for point in (*figure.points, *figure.lines)}
    return figure._replace(caption=" ".join(said), series=[each for each in figure.series if each.name in used])


def _hidden(alike: Sequence[Sequence[str]]) -> str:
    """Which lines cannot be seen for others; how many where naming them would take too long."""
    named = "; ".join(" = ".join(names) for names in alike)
    if len(named) <= LONGEST:
        return f"On one another: {named}." if named else ""
    return f"{sum(map(len, alike))} lines lie on others; the table of points has each."


def summary(figure: Figure) -> str:
    """What the figure shows, in words, for those who cannot see it."""
    known = [point for point in (*figure.points, *figure.lines) if point["y"] is not None]
    if not known:
        return f"{figure.title}: no points."
    top, bottom = (pick(known, key=lambda point: point["y"]) for pick in (max, min))
    kind = "bars and lines" if isinstance(figure, Bars) else "lines"
    return (
        f"{figure.title}. {len(figure.series)} {kind}. Highest {_at(figure, top)}; lowest {_at(figure, bottom)}. "
        "The table below it has every point."
    )


def _at(figure: Figure, point: Mapping[str, Any]) -> str:
    where = f"{figure.x.title.partition(',')[0]} {value(figure.x, point['x'])}"
    return f"{value(figure.y, point['y'])} ({point['series']}, {where})"


def value(axis: Axis, number: float) -> str:
    """A number of an axis as text."""
    return f"{100 * number:.2f}%" if axis.format == "share" else f"{number:,.4g}{axis.suffix}"
