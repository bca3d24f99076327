"""Figures of `quality`: loss against its gain, loss over a parameter, and live loss against its forecast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.figures.chart import Axis, Chart, Entry, Panel, Point, Rule, Series
from moereplay.analysis.figures.facets import MOST_COLUMNS
from moereplay.analysis.forecast import COLUMN, SIDES, Forecast, forecast, refusals
from moereplay.analysis.forecast_fit import LEVEL, Left, moved, policy_of, tiers_of
from moereplay.analysis.metrics import measured, shared
from moereplay.analysis.palette import BOUND, DASHED, DOTTED, INK, MUTED, Look, in_order, looks
from moereplay.analysis.quality import Judged, figures, judged, leading
from moereplay.results.errors import ResultError
from moereplay.results.result import Row
from moereplay.results.settings import POLICIES

FRONT, FRONT_NAME = Look(INK, dash=DOTTED, width=0.9), "best trade-offs"
ZERO = Rule(0.0, Look(MUTED, width=0.8))
BELADY = Look(BOUND, dash=DASHED, width=0.9)
DIAGONAL = Look(INK, dash=DOTTED, width=0.9)
LOSS = (
    "Loss: compared with the unmodified model, in the units of the measure, on the same examples. Bars: 95% CI over "
    "examples."
)
LABEL = "LIVE, emulated"
UNCHANGED = "output unchanged"


def _line(look: Look) -> Look:
    return Look(look.colour, look.marker, look.dash, width=0.8, size=5.0)


def _dots(look: Look) -> Look:
    return Look(look.colour, look.marker, width=0, size=5.0)


# Loss against its gain


class Against(NamedTuple):
    """The quantity that a loss is drawn against."""

    title: str
    label: str
    of: Callable[[Row], float | None]  #: from a row of `analysis.quality.figures`
    more_is_better: bool


class Outcome(NamedTuple):
    """A policy set in a panel."""

    family: str  #: the name of the set without what its lists vary
    x: float
    loss: float
    off: float


def quality_by_miss_rate(frame: pl.DataFrame) -> Chart:
    """Draw loss over miss rate (Cache-Conditional Experts, Figs. 4 to 6). Raises ResultError if no task has both."""
    return _against(frame, Against("Quality against miss rate", "miss rate", lambda row: row["live_miss_rate"], False))


def quality_by_speed(frame: pl.DataFrame) -> Chart:
    """Draw loss over simulated tokens per second. Raises ResultError if no task has both."""

    def speed(row: Row) -> float | None:
        return 1000 / row["live_tpot_ms"] if row["live_tpot_ms"] else None

    return _against(frame, Against("Quality against speed", "tokens/s, SIMULATED", speed, True))


def _against(frame: pl.DataFrame, axis: Against) -> Chart:
    """Draw a panel per task with its leading measure, a series per family, and the best trade-offs."""
    tasks = frame["task"].unique(maintain_order=True).to_list()
    panels = {task: found for task in tasks if (found := outcomes(frame, task, axis))}
    if not panels:
        raise ResultError(f"no task has examples and {axis.label}; use one whose measure is a mean over examples")
    if len(panels) > MOST_COLUMNS:
        raise ResultError(f"{len(panels)} tasks do not fit a page of {MOST_COLUMNS} columns; use fewer")
    drawn = in_order(sorted({each.family for found in panels.values() for each in found}))
    return Chart(
        title=axis.title,
        subtitle=_model(frame),
        label=LABEL,
        note=f"{LOSS} Dotted: sets that no other beats in both.",
        x=Axis(axis.label),
        y=Axis("loss"),
        columns=[f"{task}, {leading(frame, task)}" for task in panels],
        panels=[[_trade_offs(found, drawn, axis.more_is_better) for found in panels.values()]],
        legend=[*(Entry(name, _line(look)) for name, look in drawn.items()), Entry(FRONT_NAME, FRONT)],
        size=(6.0 if len(panels) == 1 else 3.2, 3.0),
        scales="columns",
    )


def _model(frame: pl.DataFrame) -> str:
    about = frame["about"][0]
    return f"{about['model']}, {about['dtype']}"


def outcomes(frame: pl.DataFrame, task: str, axis: Against) -> list[Outcome]:
    """Return the policy sets of a task that have both figures."""
    rows = {row["set"]: row for row in frame.filter(pl.col("task") == task).iter_rows(named=True)}
    first = leading(frame, task)
    own = [each for each in judged(frame) if (each.task, each.measure) == (task, first)]
    found = [(each, axis.of(figures(rows[each.set]))) for each in own]
    return [
        Outcome(each.set.partition(" ")[0], x, each.loss, each.off or 0.0)
        for each, x in found
        if x is not None and each.loss is not None
    ]


def front(found: Sequence[Outcome], more_is_better: bool) -> list[Outcome]:
    """Return the outcomes that no other beats in one figure without losing in the other, from the left."""
    sign = -1 if more_is_better else 1
    best, kept = float("inf"), []
    for each in sorted(found, key=lambda each: (sign * each.x, each.loss)):
        if each.loss < best:
            best, kept = each.loss, [*kept, each]
    return sorted(kept, key=lambda each: each.x)


def _trade_offs(found: Sequence[Outcome], drawn: Mapping[str, Look], more_is_better: bool) -> Panel:
    best = [Point(each.x, each.loss) for each in front(found, more_is_better)]
    series = [Series("", FRONT, best, behind=True)]
    for name, look in drawn.items():
        own = sorted((each for each in found if each.family == name), key=lambda each: each.x)
        points = [Point(each.x, each.loss, each.loss - each.off, each.loss + each.off) for each in own]
        series.append(Series(name, _line(look), points))
    return Panel(series, [ZERO])


# Loss over a parameter


class Outlined(NamedTuple):
    """A policy set of a family."""

    task: str
    x: float  #: the parameter
    loss: float
    off: float
    misses: float | None  #: per access


class Family(NamedTuple):
    """Sets of one name that differ in one parameter."""

    name: str
    parameter: str
    points: list[Outlined]


def quality_by_parameter(frame: pl.DataFrame) -> Chart:
    """Draw loss above miss rate over the parameter of each family: a rank, a lambda, a number of bits.

    Raises ResultError unless sets of one name differ in one number of one policy.
    """
    families = list(families_of(frame))
    if not families:
        raise ResultError(
            "quality_by_parameter needs a policy set with a list that varies one number, such as "
            'routing = ["cache_prior:lam=.1", "cache_prior:lam=.25"]; or run quality --study lambda'
        )
    if len(families) > MOST_COLUMNS:
        raise ResultError(f"{len(families)} families do not fit a page of {MOST_COLUMNS} columns; run fewer")
    drawn = in_order(sorted({point.task for family in families for point in family.points}))
    bounds = _belady(frame)
    panels = [_over_parameter(family, drawn, bounds) for family in families]
    loss = "loss: " + ", ".join(sorted({leading(frame, task) for task in drawn}))
    return Chart(
        title="Over one parameter",
        subtitle=_model(frame),
        label=LABEL,
        note=LOSS + " Belady: lower bound on misses of any eviction, for the unmodified routing." * bool(bounds),
        x=Axis("the parameter"),
        columns=[f"{family.name}, {family.parameter}" for family in families],
        rows=[loss, "miss rate"],
        panels=[[above for above, _ in panels], [below for _, below in panels]],
        legend=[*(Entry(task, _line(look)) for task, look in drawn.items()), *[Entry("Belady", BELADY)] * bool(bounds)],
        size=(6.0 if len(families) == 1 else 3.0, 1.7),
        scales="rows",
        own_x=True,
    )


def families_of(frame: pl.DataFrame) -> Iterator[Family]:
    """Return the families of a frame, in the order of its rows."""
    rows = [row for row in frame.iter_rows(named=True) if row["config"] is not None]
    found = {(each.set, each.task): each for each in judged(frame) if each.measure == leading(frame, each.task)}
    for name in dict.fromkeys(row["set"].partition(" ")[0] for row in rows):
        own = [row for row in rows if row["set"].partition(" ")[0] == name]
        varied = parameter([row["config"] for row in own])
        if varied is not None:
            points = [_outlined(row, varied, found[row["set"], row["task"]]) for row in own]
            yield Family(name, varied.partition(":")[2], [point for point in points if point is not None])


def parameter(configs: Sequence[Mapping[str, object]]) -> str | None:
    """Return `setting:parameter` of the one number in which configurations differ; None unless there is exactly one."""
    varying = [name for name in configs[0] if len({str(config[name]) for config in configs}) > 1]
    if len(varying) != 1 or varying[0] not in POLICIES:
        return None
    numbers = [_numbers(str(config[varying[0]])) for config in configs]
    names = [name for name in numbers[0] if all(name in number for number in numbers)]
    different = [name for name in names if len({number[name] for number in numbers}) > 1]
    return f"{varying[0]}:{different[0]}" if len(different) == 1 else None


def _belady(frame: pl.DataFrame) -> dict[str, float]:
    """Return Belady's misses per access by task, of sets that leave routing alone."""
    known = frame.filter(pl.col("bounds").struct.field("belady_hits").is_not_null())
    return {
        row["task"]: 1 - row["bounds"]["belady_hits"] / row["bounds"]["accesses"] for row in known.iter_rows(named=True)
    }


def _numbers(policy: str) -> dict[str, float]:
    return {name: float(text) for name, text in re.findall(r":(\w+)=(-?[0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(?![^:])", policy)}


def _outlined(row: Row, varied: str, each: Judged) -> Outlined | None:
    setting, _, name = varied.partition(":")
    if each.loss is None:
        return None
    x = _numbers(row["config"][setting])[name]
    return Outlined(row["task"], x, each.loss, each.off or 0.0, figures(row)["live_miss_rate"])


def _over_parameter(family: Family, drawn: Mapping[str, Look], bounds: Mapping[str, float]) -> tuple[Panel, Panel]:
    """Return the panels of the loss and of the miss rate."""
    above, below = [], []
    for task, look in drawn.items():
        own = sorted((point for point in family.points if point.task == task), key=lambda point: point.x)
        losses = [Point(each.x, each.loss, each.loss - each.off, each.loss + each.off) for each in own]
        above.append(Series(task, _line(look).scaled(4.0), losses))
        below.append(Series(task, _line(look).scaled(4.0), [Point(each.x, each.misses) for each in own]))
    rules = [Rule(misses, BELADY) for misses in sorted(set(bounds.values()))]
    return Panel(above, [ZERO]), Panel(below, rules, y=Axis(zero=True))


# Forecasts


def quality_forecast(frame: pl.DataFrame, measure: str) -> Chart:
    """Draw the live loss of each point over its leave-one-out forecast, for the first task that allows one.

    Raises ResultError if no task does.
    """
    made = _first(frame, measure)
    drawn = looks({point.policy for point in made.points})
    axis = {"scale": "symlog", "linear_within": made.fit.noise}
    return Chart(
        title="Live loss against its forecast",
        subtitle=f"{made.model}, {made.dtype}; {made.task}, {made.measure}, nats per token",
        label="FORECAST",
        note=(
            f"Across: forecast without any point of the policy, or without the point alone if the others refuse "
            f"(hollow). Bars: intervals of {LEVEL:.0%}. Both scales are logarithmic above the noise of the live "
            "points, and linear below it. Points that are refused even so are not drawn."
        ),
        x=Axis("forecast loss", **axis),
        y=Axis("live loss", **axis),
        panels=[[_forecasts(made, drawn)]],
        legend=[*(Entry(name, _dots(look)) for name, look in drawn.items()), Entry("as forecast", DIAGONAL)],
        size=(5.0, 4.2),
    )


def _first(frame: pl.DataFrame, measure: str) -> Forecast:
    refused = list[ResultError]()
    for task in frame["task"].unique(maintain_order=True):
        try:
            return forecast(frame, task, measure)
        except ResultError as refusal:
            refused.append(refusal)
    raise refused[0]


def _forecasts(made: Forecast, drawn: Mapping[str, Look]) -> Panel:
    known = [each for each in made.left if each.best is not None]
    ends = [value for each in known for value in (each.point.loss, each.best or 0.0)]
    diagonal = [Point(end, end) for end in (min(0.0, *ends), max(ends))]
    series = [Series("", DIAGONAL, diagonal, behind=True)]
    for name, look in drawn.items():
        own = [each for each in known if each.point.policy == name]
        for hollow in (False, True):
            points = [_forecast_point(each, made) for each in own if (each.by_others is None) is hollow]
            shape = Look(look.colour, look.marker, width=0, size=5.0, hollow=hollow)
            series.append(Series(name, shape, points, joined=False, across=True))
    return Panel(series, [Rule(0.0, Look(MUTED, width=0.6))])


def _forecast_point(left: Left, made: Forecast) -> Point:
    best = left.best or 0.0
    low, high = (moved(best, by, made.fit.noise) for by in (-made.reach, made.reach))
    return Point(best, left.point.loss, low, high)


def forecast_by_speed(frame: pl.DataFrame) -> Chart:
    """Draw forecast loss over simulated tokens/s. Raises ResultError if no configuration has both."""
    speeds = measured(frame)["tokens_per_s"]
    rows = zip(frame["config"], frame[COLUMN], speeds, strict=True)
    known = [(_policy(config), speed, found) for config, found, speed in rows if None not in (found["loss"], speed)]
    if not known:
        why = "; ".join(refusals(frame)) or "nothing was decoded"
        raise ResultError(f"forecast_by_speed has no configuration with a FORECAST and tokens/s: {why}")
    drawn = looks({policy for policy, _, _ in known})
    best = front([Outcome(policy, speed, 100 * found["loss"], 0.0) for policy, speed, found in known], True)
    series = [Series("", FRONT, [Point(each.x, each.loss) for each in best], behind=True)]
    for name, look in drawn.items():
        losses = [(speed, *(100 * found[side] for side in SIDES)) for policy, speed, found in known if policy == name]
        points = [Point(*row) for row in losses]
        series.append(Series(name, _dots(look), points, joined=False))
    note = (
        "Loss: rise of perplexity, FORECAST from live points of this model by the counters of these replays; bars "
        "cover nine in ten live runs. Dotted: configurations that no other beats in both."
    )
    return Chart(
        title="Forecast quality against speed",
        subtitle=shared(frame),
        label="FORECAST, SIMULATED",
        note=" ".join([note, *refusals(frame)]),
        x=Axis("tokens/s, SIMULATED"),
        y=Axis("perplexity, % more"),
        panels=[[Panel(series, [ZERO])]],
        legend=[*(Entry(name, _dots(look)) for name, look in drawn.items()), Entry(FRONT_NAME, FRONT)],
    )


def _policy(config: Mapping[str, Any]) -> str:
    policy = policy_of(config)
    return UNCHANGED if policy == "fetch" and not any(tiers_of(config["miss"])) else policy
