"""Hit rate against capacity: what more memory buys under each policy, and how much any policy could gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from analysis.checks import caption, ringed
from analysis.figures import curves as unbroken
from analysis.figures.curves import BELADY, GAPS, LIMIT_LINE, TICKS
from analysis.figures.facets import Facets, facets
from analysis.figures.lines import apart, from_zero, legend, panel_size, plot, ring_handles, rings
from analysis.figures.sheet import Grid, Sheet, Wording
from analysis.metrics import measured
from analysis.palette import Look, looks
from results.errors import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
TAKES_CURVES = True
LOG_FROM = 10  #: ratio of the largest to the smallest capacity from which the axis is logarithmic
NOTE = (
    "Hit rate: accesses whose expert was resident at look-up; an expert in flight is no hit. Compulsory limit: every "
    "first access of an expert misses, so that no cache without prefetch hits more. Capacity: of all expert bytes."
)


def draw(frame: pl.DataFrame, curves: pl.DataFrame | None = None) -> Figure:
    """A line per eviction policy, with both bounds where they were computed; a panel per setting.

    Where `curves` (of `results.curves.load`) hold for a panel, an unbroken line takes the place of the pieces between
    points, Belady's bound included. Raises ResultError if there is one capacity only, and no curve.
    """
    percent = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64)
    found = facets(frame, measured(frame).with_columns(percent.alias("percent")))
    panels = [found.panel(setting) for setting in found.settings]
    behind = [unbroken.beside(curves, panel) for panel in panels]
    if found.rows["percent"].n_unique() < 2 and all(lines.is_empty() for lines in behind):
        raise ResultError(
            f"hit_rate_by_capacity needs two capacities or more, found {', '.join(found.capacities)}; "
            "replay several, for example --capacity 1%,5%,25%"
        )
    drawn = looks(found.policies)
    grid = Grid([""], found.settings, panel_size(len(found.settings), 1))
    marked, curved = ringed(frame, "hit_rate"), not all(lines.is_empty() for lines in behind)
    note = " ".join(filter(None, (NOTE, GAPS if curved else "", caption(frame, "hit_rate"))))
    wording = Wording("Hit rate against capacity", found.shared, found.label, "capacity", "hit rate", note)
    sheet = Sheet(grid, wording, [*_handles(found, drawn, behind), *ring_handles(marked)])
    for (axes,), panel, lines in zip(sheet.panels, panels, behind, strict=True):
        known = set(lines["policy"])
        plot(axes, panel, "percent", "hit_rate", drawn, points=known)
        unbroken.lines(axes, lines)
        _bounds(axes, panel, lines, curved="belady" in known)
        rings(axes, panel, "percent", "hit_rate", marked)
    _scale(sheet.panels[0][0], found.rows, behind)
    return sheet.figure


def _handles(found: Facets, drawn: dict[str, Look], behind: list[pl.DataFrame]) -> list[Line2D]:
    curved = {policy for lines in behind for policy in lines["policy"]}
    known = found.rows["bound_accesses"].drop_nulls().len() > 0
    limit = [Line2D([], [], **LIMIT_LINE)] if known or curved else []
    bounded = unbroken.handles(["belady"]) if known or "belady" in curved else []
    replayed = legend(drawn)
    for handle in replayed:
        if all(handle.get_label() in set(lines["policy"]) for lines in behind):
            handle.set_linestyle("none")
    return replayed + unbroken.handles(sorted(curved - {"belady"})) + bounded + limit


def _bounds(axes: Axes, rows: pl.DataFrame, lines: pl.DataFrame, curved: bool) -> None:
    """Of a capacity the highest: where some policies of a panel may decline, theirs bounds the others as well."""
    highest = pl.col("belady_hit_rate", "compulsory_limit").max()
    bounds = rows.drop_nulls("belady_hit_rate").group_by("percent").agg(highest).sort("percent")
    if not bounds.is_empty():
        dots: dict[str, Any] = {"linestyle": "none", "marker": "."} if curved else {}
        axes.plot(bounds["percent"], bounds["belady_hit_rate"], **(BELADY | dots))
    if not lines.is_empty():
        unbroken.limit(axes, lines)
    elif not bounds.is_empty():
        axes.plot(bounds["percent"], bounds["compulsory_limit"], **LIMIT_LINE)


def _scale(axes: Axes, rows: pl.DataFrame, behind: list[pl.DataFrame]) -> None:
    """Logarithmic if capacities span more than a decade; ticks where replays are."""
    percents = rows["percent"].unique().sort().to_list()
    reached = [*percents, *(at for lines in behind for at in lines["percent"])]
    ends = min(reached), max(reached)
    logarithmic = ends[1] > LOG_FROM * ends[0]
    axes.set_xscale("log" if logarithmic else "linear")
    axes.set_xticks(_ticks(percents, ends, math.log if logarithmic else float))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
    tops = [rows[name].max() for name in ("hit_rate", "belady_hit_rate", "compulsory_limit")]
    tops += [lines["compulsory_limit"].max() for lines in behind]
    from_zero(axes, max((top for top in tops if isinstance(top, float)), default=0.0))


def _ticks(replayed: list[float], ends: tuple[float, float], scale: Callable[[float], float]) -> list[float]:
    """The replayed capacities, and round ones where a curve goes beyond them."""
    kept = apart(replayed, scale, ends)
    for tick in (tick for tick in TICKS if ends[0] <= tick < replayed[0] or replayed[-1] < tick <= ends[1]):
        more = sorted({*kept, tick})
        if apart(more, scale, ends) == more:
            kept = more
    return kept
