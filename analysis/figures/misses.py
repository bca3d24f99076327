"""Misses by cause (SpecMD, Fig. 4), and collisions by layer (Fig. 5)."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from moereplay.analysis.figures.by_capacity import BELADY_NAME
from moereplay.analysis.figures.chart import LETTER, TEXT_SIZE, Axis, Bar, Chart, Entry, Panel, Part, Rule, legend
from moereplay.analysis.figures.facets import (
    BARS,
    BY_TOKEN,
    Facets,
    More,
    covered,
    facets,
    joined,
    lines,
    panel_size,
    phase_names,
)
from moereplay.analysis.metrics import HIGH, LOW, WHY, with_ends, with_layer_ends, with_ratios
from moereplay.analysis.palette import BOUND, CAPACITY, COLLISION, COMPULSORY, DASHED, Look, looks
from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.read import phases, runs, settings

#: Column -> its legend, colour and counter, in the order of the stack.
CAUSES = {
    "compulsory": ("compulsory", COMPULSORY, "compulsory"),
    "capacity_misses": ("capacity", CAPACITY, "capacity"),
    "collisions": ("collision", COLLISION, "collisions"),
}
SEEN = 1 / 300  #: part of the longest bar below which a part is less than a pixel, and has no place in the legend
BELADY = Look(BOUND, dash=DASHED, width=1.2)


def misses(frame: pl.DataFrame) -> Chart:
    """Draw a stacked bar per eviction policy with its total; a column of panels per capacity, a row per setting."""
    table = with_ends(frame, runs(frame), ["misses_per_access"])
    ends = [(pl.col(f"misses_per_access{end}") * pl.col("accesses")).alias(f"misses{end}") for end in (LOW, HIGH)]
    laid = facets(frame, table.with_columns(ends)).columned()
    names = list(looks(laid.policies))
    longest = max(laid.rows["misses"].drop_nulls(), default=0)
    drawn = [
        cause for column, cause in CAUSES.items() if max(laid.rows[column].drop_nulls(), default=0) > SEEN * longest
    ]
    causes = drawn or list(CAUSES.values())  # without any miss all are empty
    told = sorted((name for _, _, name in causes), key=lambda name: name == "capacity")  # the others, so last
    definitions = [f"{name.capitalize()}: {COUNTERS[name].definition}." for name in told]
    bounded = not laid.rows["bound_belady_hits"].drop_nulls().is_empty()
    return Chart(
        title="Misses by reason",
        subtitle=laid.shared,
        label=laid.label,
        note=joined(*definitions, laid.bound, laid.covered, laid.intervals, laid.left_out),
        x=Axis("misses"),
        y=Axis("eviction policy"),
        columns=laid.titles,
        rows=laid.settings,
        panels=[[_panel(laid.panel(setting, size), names) for size in laid.capacities] for setting in laid.settings],
        legend=[*(Entry(name, colour) for name, colour, _ in causes), *[Entry(BELADY_NAME, BELADY)] * bounded],
        size=(5.6 if len(laid.capacities) == 1 else 3.0, max(0.25 * len(names) + 0.15, 0.9)),
        left=0.6 + max(map(len, names)) * TEXT_SIZE * LETTER,
        stacks=True,
    )


def _panel(rows: pl.DataFrame, names: list[str]) -> Panel:
    by_policy = {row["eviction"]: row for row in rows.iter_rows(named=True)}
    bars = [
        Bar(
            name,
            [Part(cause, row[cause], colour, cause == "collisions") for cause, (_, colour, _) in CAUSES.items()],
            row["misses_low"],
            row["misses_high"],
        )
        if (row := by_policy.get(name))
        else Bar(name, ())
        for name in names
    ]
    bounds = (rows["bound_accesses"] - rows["bound_belady_hits"]).drop_nulls()
    return Panel(bars=bars, rules=[] if bounds.is_empty() else [Rule(min(bounds), BELADY, BELADY_NAME, upright=True)])


# -- Collisions by layer (SpecMD, Fig. 5): where a policy evicts experts that the same pass still needs.
#
# A figure shows one phase, under the name that its schedule of passes gives it. A prompt's pass demands many experts of
# every layer, a decode pass a few; in a sum, the collisions of a few prefill passes would hide those of decode.


NOT_KEPT = "No intervals: rows by request and layer were not stored; replay with --request-layers."
#: Remedies if no pass has the phase.
WITHOUT = {
    "decode": "no pass decodes; draw collisions_in_prefill, or replay a trace that has decoded tokens",
    "prefill": "no pass is a prompt's; draw collisions_by_layer, or replay a trace of requests that have prompts",
}


def collisions_by_layer(frame: pl.DataFrame, phase: str, per: str, more: More = lambda rows: rows) -> Chart:
    """Draw a line per eviction policy over layers; a column of panels per capacity, a row per setting.

    `more` adds rows by request and layer to rows of the frame.

    Where nothing decodes and prompts run token by token, these passes are drawn in place of decode. Raises ResultError
    if nothing was replayed in that phase, or no layer has a miss (or an access) in it.
    """
    names, replayed = phase_names(frame), phases(frame)
    if phase == "decode" not in replayed and names["prefill"] == BY_TOKEN:
        phase = "prefill"
    sums = _sums(frame, phase, f"collisions_per_{per}")
    laid = facets(frame, settings(frame).join(sums, on="identity", how="semi")).columned()
    laid = replace(laid, rows=_points(more(_drawn(frame, laid.rows)), laid.rows, sums, phase, f"collisions_per_{per}"))
    drawn = looks(laid.policies)
    absent = f"Layers without any {per} have no point." * bool(laid.rows["value"].null_count())
    definition = f"Collisions: {COUNTERS['collisions'].definition}."
    return Chart(
        title=f"Collisions per {per} by layer, {names.get(phase, 'all passes')}",
        subtitle=laid.shared,
        label=laid.label,
        note=joined(covered(frame, *({phase} & names.keys())), definition, absent, _intervals(laid), laid.left_out),
        x=Axis("MoE layer", "whole"),
        y=Axis(f"collisions per {per}", "share", zero=True),
        columns=laid.titles,
        rows=laid.settings,
        panels=[
            [Panel(lines(laid.panel(setting, size), "layer", "value", drawn)) for size in laid.capacities]
            for setting in laid.settings
        ],
        legend=legend(drawn),
        size=panel_size(len(laid.settings), len(laid.capacities)),
        names_hidden=True,
        stacks=True,
    )


def _intervals(laid: Facets) -> str:
    """Explain the error bars of layers, or why there are none."""
    known, why = laid.rows["value_low"].count(), laid.rows["value_why"].drop_nulls().unique().sort().to_list()
    if not laid.intervals.startswith(BARS):
        return laid.intervals
    if not known:
        return f"No intervals: {'; '.join(why)}." if why else NOT_KEPT
    return joined(
        f"{laid.intervals[:-1]}, for each layer alone.", f"Layers without a bar: {'; '.join(why)}." * bool(why)
    )


def collisions_in_prefill(frame: pl.DataFrame, per: str, more: More = lambda rows: rows) -> Chart:
    """Draw the collisions of prefill passes.

    Raises ResultError without a prompt, where `collisions_by_layer` draws these passes, or without a collision.
    """
    replayed = phases(frame)
    if replayed == {"prefill"} and phase_names(frame)["prefill"] == BY_TOKEN:
        raise ResultError("prompts run token by token, without a prefill; draw collisions_by_layer")
    if "prefill" in replayed and not _of_phase(frame, "prefill")["collisions"].sum():
        raise ResultError("misses in a prompt's pass are never collisions; draw collisions_by_layer")
    return collisions_by_layer(frame, phase="prefill", per=per, more=more)


def _of_phase(frame: pl.DataFrame, phase: str) -> pl.DataFrame:
    """Return the counters of every configuration and layer in one phase, or in `both`."""
    counted = pl.col("per_layer").struct
    rows = frame.select(pl.col("about").struct.field("identity"), "per_layer").explode("per_layer", empty_as_null=False)
    rows = rows.select("identity", *map(counted.field, ("layer", "phase", "collisions", "misses", "accesses")))
    return rows.drop_nulls("phase") if phase == "both" else rows.filter(pl.col("phase") == phase)


def _sums(frame: pl.DataFrame, phase: str, ratio: str) -> pl.DataFrame:
    """Return a ratio of every configuration and layer, summed over phases; null where undefined."""
    rows = _of_phase(frame, phase)
    if rows.is_empty():
        raise ResultError(WITHOUT.get(phase, "no result has rows of layers; replay again with moereplay replay"))
    sums = with_ratios(rows.group_by("identity", "layer").agg(pl.col("collisions", "misses", "accesses").sum()))
    if sums[ratio].drop_nulls().is_empty():
        raise ResultError(
            f"{ratio} is undefined in every layer ({phase}): there are no misses; replay a smaller --capacity"
        )
    return sums


def _drawn(frame: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("about").struct.field("identity").is_in(rows["identity"].implode()))


def _points(frame: pl.DataFrame, rows: pl.DataFrame, sums: pl.DataFrame, phase: str, ratio: str) -> pl.DataFrame:
    """Return a row per layer of the configurations that are drawn, with `value` and its interval."""
    points = with_layer_ends(frame, rows.join(sums, on="identity"), ratio, phase)
    points = points.with_columns(pl.col(f"{ratio}{end}").alias(f"value{end}") for end in ("", LOW, HIGH, WHY))
    return points.sort("identity", "layer")
