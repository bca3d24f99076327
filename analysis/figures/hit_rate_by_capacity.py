"""Hit rate against capacity: what more memory buys under each policy, and how much any policy could gain."""

from __future__ import annotations

import math

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from analysis.errors import AnalysisError
from analysis.figures.facets import Facets, facets
from analysis.figures.lines import apart, from_zero, legend, panel_size, plot
from analysis.figures.sheet import Grid, Sheet, Wording
from analysis.metrics import measured
from analysis.palette import BOUND, LIMIT, Look, looks

OPTIONS: dict[str, tuple[str, ...]] = {}
LOG_FROM = 10  #: ratio of the largest to the smallest capacity from which the axis is logarithmic
BELADY = {"color": BOUND, "linestyle": "--", "lw": 1.4, "label": "Belady (no prefetch)"}
LIMIT_LINE = {"color": LIMIT, "linestyle": ":", "lw": 1.6, "label": "compulsory limit"}
NOTE = (
    "Hit rate: accesses whose expert was resident at look-up; an expert in flight is no hit. Compulsory limit: every "
    "first access of an expert misses, so that no cache without prefetch hits more. Capacity: of all expert bytes."
)


def draw(frame: pl.DataFrame) -> Figure:
    """A line per eviction policy, with both bounds where they were computed; a panel per setting.

    Raises AnalysisError if the rows have one capacity only.
    """
    percent = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64)
    found = facets(frame, measured(frame).with_columns(percent.alias("percent")))
    if found.rows["percent"].n_unique() < 2:
        raise AnalysisError(
            f"hit_rate_by_capacity needs two capacities or more, found {', '.join(found.capacities)}; "
            "replay several, for example --capacity 1%,5%,25%"
        )
    drawn = looks(found.policies)
    grid = Grid([""], found.settings, panel_size(len(found.settings), 1))
    wording = Wording("Hit rate against capacity", found.shared, found.label, "capacity", "hit rate", NOTE)
    sheet = Sheet(grid, wording, _handles(found, drawn))
    for row, setting in enumerate(found.settings):
        plot(sheet.panels[row][0], found.panel(setting), "percent", "hit_rate", drawn)
        _bounds(sheet.panels[row][0], found.panel(setting))
    _scale(sheet.panels[0][0], found.rows)
    return sheet.figure


def _handles(found: Facets, drawn: dict[str, Look]) -> list[Line2D]:
    known = found.rows["bound_accesses"].drop_nulls().len() > 0
    return legend(drawn) + [Line2D([], [], **look) for look in (BELADY, LIMIT_LINE) if known]


def _bounds(axes: Axes, rows: pl.DataFrame) -> None:
    """Bounds depend on the demand alone, not on the eviction policy: any row of a capacity has them."""
    bounds = rows.drop_nulls("belady_hit_rate").unique("percent", keep="first", maintain_order=True).sort("percent")
    if not bounds.is_empty():
        axes.plot(bounds["percent"], bounds["belady_hit_rate"], **BELADY)
        axes.plot(bounds["percent"], bounds["compulsory_limit"], **LIMIT_LINE)


def _scale(axes: Axes, rows: pl.DataFrame) -> None:
    """Logarithmic if capacities span more than a decade; ticks at the capacities that were replayed."""
    percents = rows["percent"].unique().sort().to_list()
    logarithmic = percents[-1] > LOG_FROM * percents[0]
    axes.set_xscale("log" if logarithmic else "linear")
    axes.set_xticks(apart(percents, math.log if logarithmic else float))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
    tops = [rows[name].max() for name in ("hit_rate", "belady_hit_rate", "compulsory_limit")]
    from_zero(axes, max((top for top in tops if isinstance(top, float)), default=0.0))
