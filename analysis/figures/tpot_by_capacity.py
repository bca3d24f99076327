"""TPOT against capacity, and tokens per second beside it: what more memory buys a user who waits for the next token."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from moereplay.analysis.checks import caption, ringed
from moereplay.analysis.figures import capacities
from moereplay.analysis.figures.ends import highest, said
from moereplay.analysis.figures.lines import legend, panel_size, plot, ring_handles, rings
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording, is_narrow
from moereplay.analysis.palette import looks
from moereplay.results.metrics import formula
from moereplay.results.read import seconds_of
from moereplay.results.result import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
#: A column of panels each.
METRICS = {"tpot_ms": "TPOT, ms", "tokens_per_s": "tokens/s, of one request"}
NOTE = f"Decode passes alone. TPOT: {formula('tpot_ms')}. tokens/s: its inverse, one token per pass."


def draw(frame: pl.DataFrame) -> Figure:
    """A line per eviction policy, a row of panels per setting, a column for milliseconds and one for their inverse.

    Raises ResultError if the rows have one capacity only, or nothing was decoded.
    """
    found = capacities.with_percents(frame, *METRICS)
    capacities.check_several(found, "tpot_by_capacity")
    if found.rows["tpot_ms"].drop_nulls().is_empty():
        raise ResultError(
            "no pass decodes, so that there is no TPOT; replay a trace of decoded tokens, for example of: "
            "moereplay record MODEL --prompts FILE --max-new-tokens 64 --out TRACE"
        )
    drawn, marked = looks(found.policies), ringed(frame, "tpot_ms")
    means = f"Seconds: {seconds_of(frame)}. {capacities.meaning(found.rows)} {said(frame)}"
    note = f"{NOTE} {means} {caption(frame, 'tpot_ms')}".rstrip()
    axis = capacities.axis(found.rows)
    wording = Wording("Time per output token against capacity", found.shared, found.label, axis, "", note)
    panels = [(setting, metric) for setting in found.settings for metric in METRICS]
    size = panel_size(len(found.settings), len(METRICS))
    if is_narrow():  # one below the other
        rows = [f"{METRICS[metric]}{', ' * bool(setting)}{setting}" for setting, metric in panels]
        grid = Grid([""], rows, size, scales="each")
    else:
        grid = Grid(list(METRICS.values()), found.settings, size, scales="columns")
    sheet = Sheet(grid, wording, [*legend(drawn), *ring_handles(marked)])
    for axes, (setting, metric) in zip((axes for row in sheet.panels for axes in row), panels, strict=True):
        plot(axes, found.panel(setting), "percent", metric, drawn)
        rings(axes, found.panel(setting), "percent", metric, marked)
        axes.set_ylim(0, 1.06 * highest(found.rows, metric) or 1)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    capacities.scale(sheet.panels[0][0], found.rows)
    return sheet.figure
