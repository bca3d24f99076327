"""TTFT against capacity: what more memory buys a user who waits for the first token."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from moereplay.analysis.checks import caption, ringed
from moereplay.analysis.comparisons import PARTS
from moereplay.analysis.figures import capacities
from moereplay.analysis.figures.ends import highest, said
from moereplay.analysis.figures.lines import legend, panel_size, plot, ring_handles, rings
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.palette import looks
from moereplay.results.metrics import formula
from moereplay.results.read import seconds_of
from moereplay.results.result import ResultError

OPTIONS = {"latency": ("ttft_mean_ms", "ttft_median_ms")}
WORDS = {"ttft_mean_ms": "mean TTFT", "ttft_median_ms": "median TTFT"}


def draw(frame: pl.DataFrame, latency: str) -> Figure:
    """A line per eviction policy, a panel per setting; requests without a prompt have no TTFT.

    Raises ResultError if the rows have one capacity only, or no request has a prompt.
    """
    found = capacities.with_percents(frame, *[latency] * (latency in PARTS))
    capacities.check_several(found, "ttft_by_capacity")
    if found.rows[latency].drop_nulls().is_empty():
        raise ResultError(
            "no request has a prompt, so that none has a TTFT; replay a trace of prompts, for example of: "
            "moereplay record MODEL --prompts FILE --out TRACE"
        )
    drawn, marked = looks(found.policies), ringed(frame, "ttft_ms")
    word = WORDS[latency]
    note = f"{word}: {formula(latency)}. Seconds: {seconds_of(frame)}. {capacities.meaning(found.rows)}"
    title = f"{word[0].upper()}{word[1:]} against capacity"
    bars = said(frame) if latency in PARTS else "No intervals: they are made of means."
    note = f"{note} {bars}{flat(found.rows, latency)} {caption(frame, 'ttft_ms')}".rstrip()
    wording = Wording(title, found.shared, found.label, capacities.axis(found.rows), f"{word}, ms", note)
    handles = [*legend(drawn), *ring_handles(marked)]
    sheet = Sheet(Grid([""], found.settings, panel_size(len(found.settings), 1)), wording, handles)
    for (axes,), setting in zip(sheet.panels, found.settings, strict=True):
        plot(axes, found.panel(setting), "percent", latency, drawn)
        rings(axes, found.panel(setting), "percent", latency, marked)
    first = sheet.panels[0][0]
    capacities.scale(first, found.rows)
    first.set_ylim(0, 1.06 * highest(found.rows, latency) or 1)  # from zero, so that lengths compare
    first.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return sheet.figure


def flat(rows: pl.DataFrame, latency: str) -> str:
    """Say that more memory changes nothing, where no line rises or falls."""
    each = rows.group_by("setting", "eviction").agg((pl.col(latency).max() - pl.col(latency).min()).alias("spread"))
    return "" if each["spread"].drop_nulls().max() else " It does not depend on the capacity."
