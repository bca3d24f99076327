"""Hit rate at every capacity as unbroken lines: on their own page, or behind the points of replays."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from moereplay.analysis.figures.lines import axis_name, from_zero, panel_size
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.palette import BOUND, LIMIT, look_of
from moereplay.results.curves import TIDY
from moereplay.results.result import ResultError
from moereplay.results.settings import OF_CURVES

MOST_PANELS = 8  #: that a page can hold
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100)  #: percent
BELADY: dict[str, Any] = {"color": BOUND, "linestyle": "--", "lw": 1.4, "label": "Belady (no prefetch)"}
LIMIT_LINE: dict[str, Any] = {"color": LIMIT, "linestyle": ":", "lw": 1.6, "label": "compulsory limit"}
GAPS = (
    "At every capacity: each whole number of experts, from one pass over the demand (stack distances). A gap: the "
    "capacity holds less than a step demands, so that a machine's times decide."
)
NOTE = f"{GAPS} Passes of either phase count; nothing is prefetched. Capacity: of all expert bytes."


def draw(curves: pl.DataFrame) -> Figure:
    """The curves of `results.curves.load` alone: a line per policy, a panel per trace, scope, schedule and reset.

    Raises ResultError if there are none, or more panels than a page can hold.
    """
    keys = ["model", "trace", *OF_CURVES]
    panels = [rows for _, rows in curves.group_by(keys, maintain_order=True)]
    if not 0 < len(panels) <= MOST_PANELS:
        raise ResultError(f"found curves of {len(panels)} settings; a page holds 1 to {MOST_PANELS}")
    policies = curves["policy"].unique().sort(descending=True).to_list()
    varying = [name for name in keys if curves[name].n_unique() > 1]
    shared = " · ".join(_worded(curves, name) for name in keys if name not in varying)
    titles = [", ".join(_worded(rows, name) for name in varying) for rows in panels]
    label = " / ".join(sorted(set(curves["label"])))
    wording = Wording("Hit rate at every capacity", shared, label, axis_name("capacity", True), "hit rate", NOTE)
    legend = [*handles(policies), Line2D([], [], **LIMIT_LINE)]
    sheet = Sheet(Grid([""], titles, panel_size(len(panels), 1)), wording, legend)
    for row, rows in enumerate(panels):
        lines(sheet.panels[row][0], rows)
        limit(sheet.panels[row][0], rows)
    _scale(sheet.panels[0][0], curves)
    return sheet.figure


def handles(policies: list[str]) -> list[Line2D]:
    """A legend entry per policy."""
    return [Line2D([], [], **_line(policy)) for policy in policies]


def lines(axes: Axes, rows: pl.DataFrame) -> None:
    """One unbroken line per policy, with a gap where hit rates are null."""
    for (policy,), line in rows.sort("percent").group_by("policy", maintain_order=True):
        axes.plot(line["percent"].to_numpy(), line["hit_rate"].fill_null(float("nan")).to_numpy(), **_line(str(policy)))


def limit(axes: Axes, rows: pl.DataFrame) -> None:
    """The hit rate that no cache without prefetch exceeds."""
    percents = rows["percent"].to_list()
    ends = [min(percents), max(percents)]
    axes.plot(ends, [rows["compulsory_limit"][0]] * 2, **LIMIT_LINE)


def beside(curves: pl.DataFrame | None, panel: pl.DataFrame) -> pl.DataFrame:
    """The curves that hold for the replays of a panel, which share all settings but eviction and capacity.

    A curve has no prefetch, no warm start, and experts as they are stored; Belady's bounds prefetching replays as well.
    What another machine's replays have decided stays a gap.
    """
    first = panel.row(0, named=True)
    if curves is None or first["miss"] != "fetch" or first["warm"]:
        return pl.DataFrame(schema=TIDY)
    same = [pl.col(name) == first[name] for name in (*OF_CURVES, "semantics")]
    found = curves.filter(pl.col("trace").str.starts_with(first["trace"]), *same)
    elsewhere = pl.col("replayed") & (pl.col("platform") != first["platform"])
    found = found.with_columns(pl.when(~elsewhere.fill_null(False)).then("hit_rate").alias("hit_rate"))
    bare = first["prefetch"] == "none" and first["routing"] == "standard"
    return found if bare else found.filter(pl.col("policy") == "belady")


def _line(policy: str) -> dict[str, Any]:
    if policy == "belady":
        return BELADY
    if policy == "relaxed_belady":
        return BELADY | {"linestyle": "-.", "label": "Belady, relaxed"}
    return {"color": look_of(policy).colour, "lw": 1.4, "label": f"{policy} at every capacity"}


def _worded(rows: pl.DataFrame, name: str) -> str:
    value = rows[name][0]
    return value if name == "model" else f"{name} {value[:8] if name == 'trace' else value}"


def _scale(axes: Axes, curves: pl.DataFrame) -> None:
    axes.set_xscale("log")
    lowest = min(curves["percent"].to_list())
    axes.set_xticks([tick for tick in TICKS if tick >= lowest])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
    from_zero(axes, max(curves["compulsory_limit"].drop_nulls().to_list(), default=0.0))
