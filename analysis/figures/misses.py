"""Misses by cause (SpecMD, Fig. 4): a policy's misses and the avoidable part of them."""

from __future__ import annotations

import polars as pl

from moereplay.analysis.figures.capacities import BELADY_NAME
from moereplay.analysis.figures.chart import Axis, Bar, Chart, Entry, Panel, Part, Rule
from moereplay.analysis.figures.facets import (
    Facets,
    bound_note,
    cells,
    columned,
    covered,
    facets,
    interval_note,
    joined,
)
from moereplay.analysis.figures.sheet import LETTER, TEXT_SIZE
from moereplay.analysis.metrics import HIGH, LOW, with_ends
from moereplay.analysis.palette import BOUND, CAPACITY, COLLISION, COMPULSORY, DASHED, Look, looks
from moereplay.results.read import runs
from moereplay.results.result import COUNTERS

#: Column -> its legend and colour, in the order of the stack.
CAUSES = {
    "compulsory": ("compulsory", COMPULSORY),
    "capacity_misses": ("capacity", CAPACITY),
    "collisions": ("collision", COLLISION),
}
BELADY = Look(BOUND, dash=DASHED, width=1.2)


def misses(frame: pl.DataFrame) -> Chart:
    """Draw a stacked bar per eviction policy with its total; a column of panels per capacity, a row per setting."""
    found = columned(facets(frame, _with_ends(frame)))
    names, laid = list(looks(found.policies)), cells(found)
    definitions = [
        f"{name.capitalize()}: {COUNTERS[name].definition}." for name in ("compulsory", "collisions", "capacity")
    ]
    bounded = not found.rows["bound_belady_hits"].drop_nulls().is_empty()
    return Chart(
        title="Misses by reason",
        subtitle=found.shared,
        label=found.label,
        note=joined(*definitions, bound_note(frame), covered(frame), interval_note(frame), found.left_out),
        x=Axis("misses"),
        y=Axis("eviction policy"),
        columns=laid.columns,
        rows=laid.rows,
        panels=[[_panel(found, names, *each) for each in row] for row in laid.shown],
        legend=[*(Entry(*each) for each in CAUSES.values()), *[Entry(BELADY_NAME, BELADY)] * bounded],
        size=(5.6 if len(found.capacities) == 1 else 3.0, max(0.25 * len(names) + 0.15, 0.9)),
        left=0.6 + max(map(len, names)) * TEXT_SIZE * LETTER,
    )


def _with_ends(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the interval of the misses, computed from the smaller of the shares of misses and hits."""
    table = with_ends(frame, runs(frame), ("misses_per_access", "found_per_access"))
    often = pl.col("misses") * 2 > pl.col("accesses")
    share = {
        end: pl.when(often)
        .then(pl.col(f"misses_per_access{end}").clip(upper_bound=1))
        .otherwise((1 - pl.col(f"found_per_access{other}")).clip(lower_bound=0))
        for end, other in ((LOW, HIGH), (HIGH, LOW))
    }
    return table.with_columns((each * pl.col("accesses")).alias(f"misses{end}") for end, each in share.items())


def _panel(found: Facets, names: list[str], setting: str, capacity: str) -> Panel:
    rows = found.panel(setting, capacity)
    known = {row["eviction"]: row for row in rows.iter_rows(named=True)}
    bars = [
        Bar(
            name,
            [Part(cause, row[cause], colour, cause == "collisions") for cause, (_, colour) in CAUSES.items()],
            row["misses_low"],
            row["misses_high"],
        )
        if (row := known.get(name))
        else Bar(name, ())
        for name in names
    ]
    bounds = (rows["bound_accesses"] - rows["bound_belady_hits"]).drop_nulls()
    return Panel(bars=bars, rules=[] if bounds.is_empty() else [Rule(min(bounds), BELADY, BELADY_NAME, upright=True)])
