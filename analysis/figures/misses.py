"""Misses by reason (SpecMD, Fig. 4): how many a policy has, and which of them it could have avoided."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from moereplay.analysis.figure_numbers import ENDS
from moereplay.analysis.figures.ends import highest, said
from moereplay.analysis.figures.facets import Facets, cells, columned, facets
from moereplay.analysis.figures.phases import covered
from moereplay.analysis.figures.sheet import LETTER, TEXT_SIZE, Grid, Sheet, Wording, is_narrow
from moereplay.analysis.metrics import HIGH, LOW, with_ends
from moereplay.analysis.palette import BOUND, CAPACITY, COLLISION, COMPULSORY, INK, looks
from moereplay.results.counters import COUNTERS
from moereplay.results.read import runs

OPTIONS: dict[str, tuple[str, ...]] = {}
#: Column -> its legend and colour, in the order of the stack.
REASONS = {
    "compulsory": ("compulsory", COMPULSORY),
    "capacity_misses": ("capacity", CAPACITY),
    "collisions": ("collision", COLLISION),
}
NARROW_ROOM = 1.5  # the same on a narrow page
BAR, ROOM = 0.72, 1.25  # height of a bar, and the longest one's room on the axis for its label
WIDE = 0.12  #: part of the axis from which a collision segment holds its label
BEHIND_TOTAL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # Belady's line may pass there
BOUND_LABEL = "Belady (no prefetch)"


def draw(frame: pl.DataFrame) -> Figure:
    """A stacked bar per eviction policy with its total; a column of panels per capacity, a row per setting."""
    found = columned(facets(frame, _with_ends(frame)))
    names = list(looks(found.policies))
    longest = max(1, highest(found.rows, "misses")) * (NARROW_ROOM if is_narrow() else ROOM)
    notes = f"{covered(frame)} {said(frame)} {found.left_out}"
    sheet = Sheet(_grid(found, names), _wording(found, notes), _handles(found))
    for panels, shown in zip(sheet.panels, cells(found).shown, strict=True):
        for axes, (setting, capacity) in zip(panels, shown, strict=True):
            _bars(axes, found.panel(setting, capacity), names, longest)
    _scale(sheet.panels[0][0], names, longest)
    return sheet.figure


def _with_ends(frame: pl.DataFrame) -> pl.DataFrame:
    """Totals, with the interval of the misses: that of their share of accesses, or of the others if these are more."""
    table = with_ends(frame, runs(frame), ("misses_per_access", "found_per_access"))
    often = pl.col("misses") * 2 > pl.col("accesses")
    share = {
        end: pl.when(often)
        .then(pl.col(f"misses_per_access{end}").clip(upper_bound=1))
        .otherwise((1 - pl.col(f"found_per_access{other}")).clip(lower_bound=0))
        for end, other in ((LOW, HIGH), (HIGH, LOW))
    }
    return table.with_columns((each * pl.col("accesses")).alias(f"misses{end}") for end, each in share.items())


def _grid(found: Facets, names: list[str]) -> Grid:
    left = 0.6 + max(map(len, names)) * TEXT_SIZE * LETTER
    width = 5.6 if len(found.capacities) == 1 else 3.0
    laid = cells(found)
    return Grid(laid.columns, laid.rows, (width, max(0.25 * len(names) + 0.15, 0.9)), left)


def _wording(found: Facets, phases: str) -> Wording:
    reasons = [
        f"{name.capitalize()}: {COUNTERS[name].definition}." for name in ("compulsory", "collisions", "capacity")
    ]
    note = " ".join((*reasons, phases)).rstrip()
    return Wording("Misses by reason", found.shared, found.label, "misses", "eviction policy", note)


def _handles(found: Facets) -> list[Patch | Line2D]:
    patches: list[Patch | Line2D] = [Patch(facecolor=colour, label=label) for label, colour in REASONS.values()]
    if found.rows["bound_belady_hits"].drop_nulls().is_empty():
        return patches
    return [*patches, Line2D([], [], color=BOUND, linestyle="--", lw=1.2, label=BOUND_LABEL)]


def _bars(axes: Axes, rows: pl.DataFrame, names: list[str], longest: float) -> None:
    for bar in rows.iter_rows(named=True):
        _bar(axes, bar, names.index(bar["eviction"]), longest)
    bounds = (rows["bound_accesses"] - rows["bound_belady_hits"]).drop_nulls()
    if not bounds.is_empty():
        axes.axvline(min(bounds), color=BOUND, linestyle="--", lw=1.2, label=BOUND_LABEL)
    axes.grid(axis="y", visible=False)


def _bar(axes: Axes, bar: dict[str, Any], at: int, longest: float) -> None:
    left = 0
    for reason, (_, colour) in REASONS.items():
        axes.barh(at, bar[reason], left=left, height=BAR, color=colour, label=reason)
        left += bar[reason]
    end = left if bar["misses_high"] is None else bar["misses_high"]
    if bar["misses_low"] is not None:
        axes.hlines(at, bar["misses_low"], end, colors=INK, linewidth=1.1, label=f"{ENDS}{bar['eviction']}")
    axes.text(
        end + longest / 80,
        at,
        f"{left:,}",
        va="center",
        fontsize=6.5 if is_narrow() else 7.5,
        fontweight="bold",
        bbox=BEHIND_TOTAL,
    )
    if bar["collisions"] > WIDE * longest:
        middle = left - bar["collisions"] / 2
        axes.text(middle, at, f"{bar['collisions']:,}", va="center", ha="center", fontsize=7, color="white")


def _scale(axes: Axes, names: list[str], longest: float) -> None:
    axes.set_xlim(0, longest)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
