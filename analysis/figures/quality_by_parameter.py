"""Quality and miss rate over the parameter that a family of policy sets varies: a rank, a lambda, a number of bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moereplay.analysis.figures.facets import MOST_COLUMNS
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.palette import BOUND, MUTED, Look, in_order
from moereplay.analysis.quality import Judged, figures, judged, leading
from moereplay.results.result import ResultError, Row
from moereplay.results.settings import POLICIES

OPTIONS: dict[str, tuple[str, ...]] = {}
BELADY = {"color": BOUND, "lw": 0.9, "linestyle": "--"}
NOTE = (
    "Loss: how much worse than the unmodified model, in the units of the task's measure, on the same examples; bars "
    "are 95 % intervals over examples. Belady: the fewest misses of any eviction, where the model runs its own choice."
)


class Point(NamedTuple):
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
    points: list[Point]


def draw(frame: pl.DataFrame) -> Figure:
    """A column per family, loss above miss rate, a line per task.

    Raises ResultError unless the sets of a name differ in one number of one policy.
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
    bounds = belady(frame)
    about = frame["about"][0]
    words = Wording(
        "Over one parameter", f"{about['model']}, {about['dtype']}", "LIVE, emulated", "the parameter", "", NOTE
    )
    titles, wide = [f"{family.name}, {family.parameter}" for family in families], len(families) == 1
    grid = Grid(titles, [_loss(frame, drawn), "miss rate"], (6.0 if wide else 3.0, 1.7), scales="rows", own_x=True)
    sheet = Sheet(grid, words, list(_legend(drawn, bounds)))
    for column, family in enumerate(families):
        _fill(sheet.panels[0][column], sheet.panels[1][column], family, drawn)
        for misses in set(bounds.values()):
            sheet.panels[1][column].axhline(misses, **BELADY)
    sheet.panels[1][0].set_ylim(bottom=0)
    return sheet.figure


def families_of(frame: pl.DataFrame) -> Iterator[Family]:
    """In the order of the rows."""
    rows = [row for row in frame.iter_rows(named=True) if row["config"] is not None]
    found = {(each.set, each.task): each for each in judged(frame) if each.measure == leading(frame, each.task)}
    for name in dict.fromkeys(row["set"].partition(" ")[0] for row in rows):
        own = [row for row in rows if row["set"].partition(" ")[0] == name]
        varied = parameter([row["config"] for row in own])
        if varied is not None:
            points = [_point(row, varied, found[row["set"], row["task"]]) for row in own]
            yield Family(name, varied.partition(":")[2], [point for point in points if point is not None])


def parameter(configs: Sequence[Mapping[str, object]]) -> str | None:
    """`setting:parameter` of the one number in which configurations differ; None if there is no such one."""
    varying = [name for name in configs[0] if len({str(config[name]) for config in configs}) > 1]
    if len(varying) != 1 or varying[0] not in POLICIES:
        return None
    numbers = [_numbers(str(config[varying[0]])) for config in configs]
    names = [name for name in numbers[0] if all(name in each for each in numbers)]
    different = [name for name in names if len({each[name] for each in numbers}) > 1]
    return f"{varying[0]}:{different[0]}" if len(different) == 1 else None


def belady(frame: pl.DataFrame) -> dict[str, float]:
    """Misses per access of Belady by task, of the sets that leave routing alone."""
    known = frame.filter(pl.col("bounds").struct.field("belady_hits").is_not_null())
    return {
        row["task"]: 1 - row["bounds"]["belady_hits"] / row["bounds"]["accesses"] for row in known.iter_rows(named=True)
    }


def _numbers(policy: str) -> dict[str, float]:
    return {name: float(text) for name, text in re.findall(r":(\w+)=(-?[0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(?![^:])", policy)}


def _point(row: Row, varied: str, each: Judged) -> Point | None:
    setting, _, name = varied.partition(":")
    if each.loss is None:
        return None
    x = _numbers(row["config"][setting])[name]
    return Point(row["task"], x, each.loss, each.off or 0.0, figures(row)["live_miss_rate"])


def _loss(frame: pl.DataFrame, drawn: Mapping[str, Look]) -> str:
    return "loss: " + ", ".join(sorted({leading(frame, task) for task in drawn}))


def _legend(drawn: Mapping[str, Look], bounds: Mapping[str, float]) -> Iterator[Line2D]:
    for task, look in drawn.items():
        yield Line2D([], [], **(look.line() | {"markersize": 5, "lw": 0.8}), label=task)
    if bounds:
        yield Line2D([], [], **BELADY, label="Belady")


def _fill(above: Axes, below: Axes, family: Family, drawn: Mapping[str, Look]) -> None:
    above.axhline(0, color=MUTED, lw=0.8)
    for task, look in drawn.items():
        own = sorted((point for point in family.points if point.task == task), key=lambda point: point.x)
        at, loss, off = ([getattr(point, what) for point in own] for what in ("x", "loss", "off"))
        shape = look.line() | {"markersize": 4, "lw": 0.8}
        above.errorbar(at, loss, yerr=off, elinewidth=0.8, capsize=2, **shape)
        misses = [float("nan") if point.misses is None else point.misses for point in own]
        below.plot(at, misses, **shape)
