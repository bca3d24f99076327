"""Misses by reason (SpecMD, Fig. 4): how many a policy has, and which of them it could have avoided."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from moereplay.analysis.figures.facets import Facets, column_titles, facets
from moereplay.analysis.figures.phases import covered
from moereplay.analysis.figures.sheet import LETTER, TEXT_SIZE, Grid, Sheet, Wording
from moereplay.analysis.palette import BOUND, CAPACITY, COLLISION, COMPULSORY, looks
from moereplay.results.counters import COUNTERS
from moereplay.results.read import runs

OPTIONS: dict[str, tuple[str, ...]] = {}
#: Column -> its legend and colour, in the order of the stack.
REASONS = {
    "compulsory": ("compulsory", COMPULSORY),
    "capacity_misses": ("capacity", CAPACITY),
    "collisions": ("collision", COLLISION),
}
BAR, ROOM = 0.72, 1.25  # height of a bar, and the longest one's room on the axis for its label
WIDE = 0.12  #: part of the axis from which a collision segment holds its label
BEHIND_TOTAL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # Belady's line may pass there
BOUND_LABEL = "Belady (no prefetch)"


def draw(frame: pl.DataFrame) -> Figure:
    """A stacked bar per eviction policy with its total; a column of panels per capacity, a row per setting."""
    found = facets(frame, runs(frame))
    names = list(looks(found.policies))
    longest = max(1, int(found.rows["misses"].to_numpy().max())) * ROOM
    sheet = Sheet(_grid(found, names), _wording(found, covered(frame)), _handles(found))
    for row, setting in enumerate(found.settings):
        for column, capacity in enumerate(found.capacities):
            _bars(sheet.panels[row][column], found.panel(setting, capacity), names, longest)
    _scale(sheet.panels[0][0], names, longest)
    return sheet.figure


def _grid(found: Facets, names: list[str]) -> Grid:
    left = 0.6 + max(map(len, names)) * TEXT_SIZE * LETTER
    width = 5.6 if len(found.capacities) == 1 else 3.0
    return Grid(column_titles(found), found.settings, (width, max(0.25 * len(names) + 0.15, 0.9)), left)


def _wording(found: Facets, phases: str) -> Wording:
    reasons = [
        f"{name.capitalize()}: {COUNTERS[name].definition}." for name in ("compulsory", "collisions", "capacity")
    ]
    note = " ".join((*reasons, phases)).rstrip()
    return Wording("Misses by reason", found.shared, found.label, "misses", "eviction policy", note)


def _handles(found: Facets) -> list[Patch | Line2D]:
    patches: list[Patch | Line2D] = [Patch(facecolor=colour, label=label) for label, colour in REASONS.values()]
    if found.rows["bound_accesses"].drop_nulls().is_empty():
        return patches
    return [*patches, Line2D([], [], color=BOUND, linestyle="--", lw=1.2, label=BOUND_LABEL)]


def _bars(axes: Axes, rows: pl.DataFrame, names: list[str], longest: float) -> None:
    for bar in rows.iter_rows(named=True):
        _bar(axes, bar, names.index(bar["eviction"]), longest)
    bounds = (rows["bound_accesses"] - rows["bound_belady_hits"]).drop_nulls()
    if not bounds.is_empty():
        axes.axvline(min(bounds), color=BOUND, linestyle="--", lw=1.2)
    axes.grid(axis="y", visible=False)


def _bar(axes: Axes, bar: dict[str, Any], at: int, longest: float) -> None:
    left = 0
    for reason, (_, colour) in REASONS.items():
        axes.barh(at, bar[reason], left=left, height=BAR, color=colour, label=reason)
        left += bar[reason]
    axes.text(left + longest / 80, at, f"{left:,}", va="center", fontsize=7.5, fontweight="bold", bbox=BEHIND_TOTAL)
    if bar["collisions"] > WIDE * longest:
        middle = left - bar["collisions"] / 2
        axes.text(middle, at, f"{bar['collisions']:,}", va="center", ha="center", fontsize=7, color="white")


def _scale(axes: Axes, names: list[str], longest: float) -> None:
    axes.set_xlim(0, longest)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
