"""Collisions by layer (SpecMD, Fig. 5): where in the model a policy evicts what the same pass still needs.

A figure is of one phase. A prompt's pass demands many experts of every layer, a decode pass a few; summed, the
collisions of a few prefill passes hide those of decode. `collisions_in_prefill` draws the other phase.
"""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moereplay.analysis.figures.facets import Facets, cells, columned, facets
from moereplay.analysis.figures.lines import from_zero, legend, panel_size, plot
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.metrics import with_ratios
from moereplay.analysis.palette import looks
from moereplay.results.counters import COUNTERS
from moereplay.results.read import layers
from moereplay.results.result import ResultError

OPTIONS = {"phase": ("decode", "prefill", "both"), "per": ("miss", "access")}
PASSES = {
    "decode": "Decode passes alone.",
    "prefill": "Prefill passes alone, those of prompts.",
    "both": "Prefill and decode passes, summed.",
}
NO_ENDS = "No intervals: rows of requests are not stored by layer."
#: What to do without passes of a phase.
WITHOUT = {
    "decode": "no pass decodes; draw collisions_in_prefill, or replay a trace that has decoded tokens",
    "prefill": "no pass is a prompt's; draw collisions_by_layer, or replay a trace of requests that have prompts",
}


def draw(frame: pl.DataFrame, phase: str, per: str) -> Figure:
    """A line per eviction policy over layers; a column of panels per capacity, a row per setting.

    Raises ResultError if nothing was replayed in that phase, or no layer has a miss (or an access) in it.
    """
    found = columned(facets(frame, _points(frame, phase, f"collisions_per_{per}")))
    drawn = looks(found.policies)
    size, laid = panel_size(len(found.settings), len(found.capacities)), cells(found)
    sheet = Sheet(Grid(laid.columns, laid.rows, size), _wording(found, phase, per), legend(drawn))
    for panels, shown in zip(sheet.panels, laid.shown, strict=True):
        for axes, (setting, capacity) in zip(panels, shown, strict=True):
            plot(axes, found.panel(setting, capacity), "layer", "value", drawn)
    _scale(sheet.panels[0][0], found.rows)
    return sheet.figure


def _points(frame: pl.DataFrame, phase: str, ratio: str) -> pl.DataFrame:
    """A row per configuration and layer, counters summed over the wanted phases, with `value` null where undefined."""
    rows = layers(frame)
    rows = rows if phase == "both" else rows.filter(pl.col("phase") == phase)
    if rows.is_empty():
        raise ResultError(WITHOUT.get(phase, "no result has rows of layers; replay again with moereplay replay"))
    sums = rows.group_by("identity", "layer").agg(pl.col("collisions", "misses", "accesses").sum())
    about = rows.drop("layer", "collisions", "misses", "accesses").unique("identity", maintain_order=True)
    points = with_ratios(sums.join(about, on="identity")).with_columns(pl.col(ratio).alias("value"))
    if points["value"].drop_nulls().is_empty():
        raise ResultError(
            f"{ratio} is undefined in every layer ({phase}): nothing misses there; replay a smaller --capacity"
        )
    return points.sort("identity", "layer")


def _wording(found: Facets, phase: str, per: str) -> Wording:
    when = "prefill and decode together" if phase == "both" else phase
    return Wording(
        title=f"Collisions per {per} by layer, {when}",
        subtitle=found.shared,
        label=found.label,
        x="MoE layer",
        y=f"collisions per {per}",
        note=f"{PASSES[phase]} Collisions: {COUNTERS['collisions'].definition}. "
        f"Layers without any {per} have no point. {NO_ENDS} {found.left_out}".rstrip(),
    )


def _scale(axes: Axes, rows: pl.DataFrame) -> None:
    """One scale for all panels."""
    last = int(rows["layer"].to_numpy().max())
    axes.set_xlim(-0.5 - last / 60, last + 0.5 + last / 60)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    from_zero(axes, float(rows["value"].drop_nulls().to_numpy().max()))
