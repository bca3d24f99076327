"""Hit rate against capacity: what more memory buys under each policy, and how much any policy could gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moereplay.analysis.checks import caption, ringed
from moereplay.analysis.figures import capacities
from moereplay.analysis.figures import curves as unbroken
from moereplay.analysis.figures.curves import BELADY, GAPS, LIMIT_LINE, TICKS
from moereplay.analysis.figures.ends import said
from moereplay.analysis.figures.facets import Facets
from moereplay.analysis.figures.lines import (
    apart,
    axis_name,
    from_zero,
    legend,
    panel_size,
    plot,
    ring_handles,
    rings,
    spans_a_decade,
)
from moereplay.analysis.figures.phases import covered
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.palette import Look, looks
from moereplay.results.settings import OF_CURVES

OPTIONS: dict[str, tuple[str, ...]] = {}
TAKES_CURVES = True
NOTE = (
    "Hit rate: accesses whose expert was resident at look-up; an expert in flight is no hit. Compulsory limit: every "
    "first access of an expert misses, so that no cache without prefetch hits more."
)


def draw(frame: pl.DataFrame, curves: pl.DataFrame | None = None) -> Figure:
    """A line per eviction policy, with both bounds where they were computed; a panel per setting.

    Where `curves` (of `results.curves.load`) hold for a panel, an unbroken line takes the place of the pieces between
    points, Belady's bound included. Raises ResultError if there is one capacity only, and no curve.
    """
    found = capacities.with_percents(frame, "hit_rate")
    panels = [found.panel(setting) for setting in found.settings]
    behind = [unbroken.beside(curves, panel) for panel in panels]
    curved = not all(lines.is_empty() for lines in behind)
    if not curved:
        capacities.check_several(found, "hit_rate_by_capacity")
    drawn = looks(found.policies)
    grid = Grid([""], found.settings, panel_size(len(found.settings), 1))
    marked = ringed(frame, "hit_rate")
    parts = (NOTE, capacities.meaning(found.rows), covered(frame), said(frame), GAPS if curved else "")
    note = " ".join(filter(None, (*parts, caption(frame, "hit_rate"))))
    axis = axis_name("capacity", spans_a_decade(_reached(found.rows, behind)))
    wording = Wording("Hit rate against capacity", found.shared, found.label, axis, "hit rate", note)
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
    known = {name: found.rows[name].drop_nulls().len() > 0 for name in ("belady_hit_rate", "compulsory_limit")}
    limit = [Line2D([], [], **LIMIT_LINE)] if known["compulsory_limit"] or curved else []
    bounded = unbroken.handles(["belady"]) if known["belady_hit_rate"] or "belady" in curved else []
    replayed = legend(drawn)
    for handle in replayed:
        if all(handle.get_label() in set(lines["policy"]) for lines in behind):
            handle.set_linestyle("none")
    return replayed + unbroken.handles(sorted(curved - {"belady"})) + bounded + limit


def unmatched(frame: pl.DataFrame, curves: pl.DataFrame) -> str:
    """Which curves stand behind no replay of a frame, in words; empty if each of them does."""
    found = capacities.with_percents(frame)
    behind = [unbroken.beside(curves, found.panel(setting)) for setting in found.settings]
    used = {identity for rows in behind for identity in rows["identity"]}
    left = curves.filter(~pl.col("identity").is_in(used)).unique("identity").sort("policy", "identity")
    many = f"{len(left)} of {curves['identity'].n_unique()} curves match no replay"
    names = dict.fromkeys(f"{row['policy']}{_apart(row, found.rows)}" for row in left.iter_rows(named=True))
    return f"{many}: {', '.join(names)}" if names else ""


def _apart(curve: Mapping[str, Any], rows: pl.DataFrame) -> str:
    """The settings of a curve that no replay has, in brackets."""
    foreign = [f"{name} {curve[name]}" for name in OF_CURVES if curve[name] not in rows[name]]
    other = [] if any(curve["trace"].startswith(trace) for trace in rows["trace"]) else [f"trace {curve['trace'][:12]}"]
    return f" ({', '.join([*other, *foreign])})" if other or foreign else ""


def _bounds(axes: Axes, rows: pl.DataFrame, lines: pl.DataFrame, curved: bool) -> None:
    """Of a capacity the highest: where some policies of a panel may decline, theirs bounds the others as well."""
    highest = pl.col("belady_hit_rate", "compulsory_limit").max()
    every = rows.group_by("percent").agg(highest).sort("percent")
    bounds, limits = every.drop_nulls("belady_hit_rate"), every.drop_nulls("compulsory_limit")
    if not bounds.is_empty():
        dots: dict[str, Any] = {"linestyle": "none", "marker": "."} if curved else {}
        axes.plot(bounds["percent"], bounds["belady_hit_rate"], **(BELADY | dots))
    if not lines.is_empty():
        unbroken.limit(axes, lines)
    elif not limits.is_empty():
        axes.plot(limits["percent"], limits["compulsory_limit"], **LIMIT_LINE)


def _scale(axes: Axes, rows: pl.DataFrame, behind: list[pl.DataFrame]) -> None:
    """Logarithmic if capacities span more than a decade; ticks where replays are."""
    ends = _reached(rows, behind)
    logarithmic = spans_a_decade(ends)
    axes.set_xscale("log" if logarithmic else "linear")
    word, inches, replayed = capacities.worded(rows), capacities.inches_of(axes), capacities.percents(rows)
    spaced = partial(apart, scale=math.log if logarithmic else float, word=word, inches=inches, ends=ends)
    capacities.named(axes, _ticks(replayed, ends, spaced), word, replayed)
    tops = [rows[name].max() for name in ("hit_rate", "hit_rate_high", "belady_hit_rate", "compulsory_limit")]
    tops += [lines["compulsory_limit"].max() for lines in behind]
    from_zero(axes, max((top for top in tops if isinstance(top, float)), default=0.0))


def _reached(rows: pl.DataFrame, behind: list[pl.DataFrame]) -> tuple[float, float]:
    """The smallest and the largest capacity of replays and curves."""
    reached = [*capacities.percents(rows), *(at for lines in behind for at in lines["percent"])]
    return min(reached), max(reached)


def _ticks(
    replayed: list[float], ends: tuple[float, float], spaced: Callable[[list[float]], list[float]]
) -> list[float]:
    """The replayed capacities, and round ones where a curve goes beyond them."""
    kept = spaced(replayed)
    for tick in (tick for tick in TICKS if ends[0] <= tick < replayed[0] or replayed[-1] < tick <= ends[1]):
        more = sorted({*kept, tick})
        if spaced(more) == more:
            kept = more
    return kept
