"""The axis of capacities, and the background of replay points: bounds, and curves over all capacities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import polars as pl

from moereplay.analysis.figures.chart import Axis, Chart, Entry, Panel, Point, Series, Tick, spans_a_decade
from moereplay.analysis.figures.facets import Facets, facets
from moereplay.analysis.metrics import measured, with_ends
from moereplay.analysis.palette import BOUND, DASH_DOTTED, DASHED, DOTTED, LIMIT, Look, look_of
from moereplay.results.curves import TIDY
from moereplay.results.errors import ResultError
from moereplay.results.remarks import one_label
from moereplay.results.settings import OF_CURVES
from moereplay.traces.drafts import OFF
from moereplay.traces.texts import digits

ALIKE = 1.01  #: largest ratio of two sizes of all experts that are equal, as percentages have four digits
PERCENT = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64).alias("percent")
ROUND = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100)  #: percentages that curves are labelled with
MOST_PANELS = 8  #: of curves on a page
BELADY, BELADY_NAME = Look(BOUND, dash=DASHED), "Belady (no prefetch)"
LIMIT_LINE, LIMIT_NAME = Look(LIMIT, dash=DOTTED, width=1.6), "compulsory limit"
EVERY_CAPACITY = "At every capacity: each whole number of experts, from one pass over the demand (stack distances)."
GAPS = "A gap: the capacity holds less than a step demands, so that hits depend on the times of a machine."
FEW = 16  #: capacities of a curve that is counted at those alone: a dot each
DOTS = "Belady, relaxed: an upper bound, counted at the dots alone; between them it may lie above the line."
CURVES_NOTE = "Passes of either phase count; nothing is prefetched. Capacity: of all expert bytes."


# The axis


def with_percents(frame: pl.DataFrame, *figures: str) -> Facets:
    """Lay out the configurations with metrics, intervals of `figures`, and `percent`: capacity of all expert bytes."""
    return facets(frame, with_ends(frame, measured(frame), figures).with_columns(PERCENT))


def percents(rows: pl.DataFrame) -> list[float]:
    """Return the capacities, rising."""
    return rows["percent"].unique().sort().to_list()


def check_several(found: Facets, figure: str) -> None:
    """Raises ResultError if all rows have one capacity."""
    if len(percents(found.rows)) < 2:
        raise ResultError(
            f"{figure} needs two capacities or more, found {', '.join(found.capacities)}; "
            "replay several, for example --capacity 1%,5%,25%"
        )


def capacity_axis(rows: pl.DataFrame, behind: Sequence[pl.DataFrame] = ()) -> Axis:
    """Return the axis of replayed capacities, with round ones where a curve goes beyond them."""
    replayed, word = percents(rows), _worded(rows)
    reached = [*replayed, *(at for lines in behind for at in lines["percent"])]
    ends = min(reached), max(reached)
    more = [tick for tick in ROUND if ends[0] <= tick < replayed[0] or replayed[-1] < tick <= ends[1]]
    scale = "log" if spans_a_decade(ends) else "linear"
    ticks, further = ([Tick(at, word(at)) for at in places] for places in (replayed, more))
    return Axis("capacity", scale=scale, ticks=ticks, more_ticks=further)


def meaning(rows: pl.DataFrame) -> str:
    """Return a sentence that explains the ticks."""
    return "Capacity: of all expert bytes." if _unit_of(rows) in ("%", "") else "Capacity: of experts, as typed."


def _unit_of(rows: pl.DataFrame) -> str:
    """Return the unit of every capacity as typed; empty for several units, or models of several sizes."""
    units = {text.lstrip("0123456789.") for text in rows["capacity"]}
    places = rows.select("percent", "capacity").drop_nulls()
    wholes = [_number(text) / percent for percent, text in places.iter_rows() if percent]
    alike = len(units) == 1 and wholes and max(wholes) <= ALIKE * min(wholes)
    return units.pop() if alike else ""


def _number(capacity: str) -> float:
    return float("".join(takewhile(lambda letter: letter in "0123456789.", capacity)) or 0)


def _worded(rows: pl.DataFrame) -> Callable[[float], str]:
    """Label a capacity as the user typed it if all have the same unit, else in percent."""
    unit = _unit_of(rows)
    typed = dict(zip(rows["percent"], rows["capacity"], strict=True)) if unit not in ("%", "") else {}
    one = next(((percent, float(text.removesuffix(unit))) for percent, text in typed.items() if percent), None)

    def word(percent: float) -> str:
        if percent in typed:
            return typed[percent]
        return f"{percent:g}%" if one is None else f"{digits(percent * one[1] / one[0], 2)}{unit}"

    return word


# Bounds and curves


def bounds(rows: pl.DataFrame, points: bool = False) -> list[Series]:
    """Return Belady's bound and the compulsory limit at each `percent`, where they were computed.

    The highest of a capacity counts: a policy that may reject misses has a higher bound, which holds for all. `points`
    draws Belady's as dots, on a curve.
    """
    highest = rows.group_by("percent").agg(pl.col("belady_hit_rate", "compulsory_limit").max()).sort("percent")
    looks = (("belady_hit_rate", BELADY_NAME, BELADY), ("compulsory_limit", LIMIT_NAME, LIMIT_LINE))
    found = []
    for column, name, look in looks:
        known = highest.drop_nulls(column).select("percent", column)
        dots = points and column == "belady_hit_rate"
        shape = Look(look.colour, ".", size=6.0) if dots else look
        found.append(Series(name, shape, [Point(*row) for row in known.iter_rows()], joined=not dots, measured=False))
    return [each for each in found if each.points]


def curve_look(policy: str) -> tuple[str, Look]:
    """Return the name and look of the curve of a policy."""
    if policy == "belady":
        return BELADY_NAME, BELADY
    if policy == "relaxed_belady":
        return "Belady, relaxed", Look(BOUND, dash=DASH_DOTTED)
    return f"{policy} at every capacity", Look(look_of(policy).colour)


def _is_dotted(policy: str, many: int) -> bool:
    """Return whether a curve is a bound that was counted at a few capacities, as experts differ in bytes."""
    return policy == "relaxed_belady" and many <= FEW


def counted_at(curves: pl.DataFrame) -> str:
    """Return the sentences on the capacities of curves, and on the gaps that they have; empty without a curve."""
    gaps = f" {GAPS}" if curves["hit_rate"].null_count() else ""
    return "" if curves.is_empty() else f"{EVERY_CAPACITY}{gaps}"


def dots_of(curves: pl.DataFrame) -> str:
    """Return the sentence on a bound's dots; empty if no curve has any."""
    many = curves.group_by("policy", "identity").len()
    return DOTS if any(_is_dotted(*each) for each in many.select("policy", "len").iter_rows()) else ""


def curve_series(curves: pl.DataFrame, most: int = 0) -> list[Series]:
    """Return a line per curve of `results.curves.load`, with a gap where hit rates are null.

    Settings that vary among the curves are part of the names. With `most`, lines are thinned to about that many points.
    """
    varying = [name for name in (*OF_CURVES, "seed") if curves[name].n_unique() > 1]
    found = []
    for _, rows in curves.sort("percent").group_by("policy", "identity", maintain_order=True):
        thin = rows.gather_every(max(1, len(rows) // most)) if most else rows
        points = [Point(*row) for row in thin.select("percent", "hit_rate").iter_rows()]
        name, look = curve_look(rows["policy"][0])
        if _is_dotted(rows["policy"][0], len(rows)):
            look = replace(look, marker="o", size=3.0)
        unlike = "".join(f", {each} {rows[each][0]}" for each in varying)
        found.append(Series(f"{name}{unlike}", look, points, measured=False))
    return found


def limit_of(curves: pl.DataFrame) -> Series:
    """Return the hit rate that no cache without prefetch exceeds, as a line over the width of the curves."""
    ends = min(curves["percent"]), max(curves["percent"])
    return Series(LIMIT_NAME, LIMIT_LINE, [Point(at, curves["compulsory_limit"][0]) for at in ends], measured=False)


def behind(curves: pl.DataFrame | None, panel: pl.DataFrame) -> pl.DataFrame:
    """Return the curves that match the replays of a panel, which share all settings but eviction and capacity.

    Curves have no prefetch, no warm start, no residents and stored precision; Belady's curve also bounds replays with
    prefetch. Requests that arrive are in passes of their own.
    Hit rates that depend on another platform are a gap.
    """
    first = panel.row(0, named=True)
    timed = first["arrivals"] != "all"
    if curves is None or first["miss"] != "fetch" or first["warm"] or first["resident"] or timed:
        return pl.DataFrame(schema=TIDY)
    same = [pl.col(name) == first[name] for name in (*OF_CURVES, "semantics")]
    if first["draft"] != OFF:
        same.append(pl.col("seed").is_in(panel["seed"].cast(pl.String).unique().to_list()))
    found = curves.filter(pl.col("trace").str.starts_with(first["trace"]), *same)
    elsewhere = pl.col("replayed") & (pl.col("platform") != first["platform"])
    found = found.with_columns(pl.when(~elsewhere.fill_null(False)).then("hit_rate").alias("hit_rate"))
    bare = first["prefetch"] == "none" and first["routing"] == "standard"
    return found if bare else found.filter(pl.col("policy") == "belady")


def unmatched(frame: pl.DataFrame, curves: pl.DataFrame) -> str:
    """Return the names of curves that match no replay of a frame."""
    found = with_percents(frame)
    used = {name for setting in found.settings for name in behind(curves, found.panel(setting))["identity"]}
    left = curves.filter(~pl.col("identity").is_in(used)).unique("identity").sort("policy", "identity")
    many = f"{len(left)} of {curves['identity'].n_unique()} curves match no replay"
    names = dict.fromkeys(f"{row['policy']}{_foreign(row, found.rows)}" for row in left.iter_rows(named=True))
    return f"{many}: {', '.join(names)}" if names else ""


def _foreign(curve: Mapping[str, Any], rows: pl.DataFrame) -> str:
    """Return the settings of a curve that no replay has, in brackets."""
    foreign = [f"{name} {curve[name]}" for name in OF_CURVES if curve[name] not in rows[name]]
    other = [] if any(curve["trace"].startswith(trace) for trace in rows["trace"]) else [f"trace {curve['trace'][:12]}"]
    return f" ({', '.join([*other, *foreign])})" if other or foreign else ""


def curves_alone(curves: pl.DataFrame) -> Chart:
    """Draw the curves of `results.curves.load` alone: a line per policy, a panel per trace and settings.

    Raises ResultError if there are none, or more panels than a page can hold.
    """
    keys = ["model", "trace", *OF_CURVES]
    groups = [rows for _, rows in curves.group_by(keys, maintain_order=True)]
    if not 0 < len(groups) <= MOST_PANELS:
        raise ResultError(f"found curves of {len(groups)} settings; a page holds 1 to {MOST_PANELS}")
    varying = [name for name in keys if curves[name].n_unique() > 1]
    lowest = min(curves["percent"].to_list())
    policies = curves["policy"].unique().sort(descending=True).to_list()
    return Chart(
        title="Hit rate at every capacity",
        subtitle=" · ".join(_named(curves, name) for name in keys if name not in varying),
        label=one_label(curves["label"]),
        note=" ".join(filter(None, (counted_at(curves), dots_of(curves), CURVES_NOTE))),
        x=Axis("capacity", scale="log", ticks=[Tick(tick, f"{tick:g}%") for tick in ROUND if tick >= lowest]),
        y=Axis("hit rate", "share", zero=True),
        rows=[", ".join(_named(rows, name) for name in varying) for rows in groups],
        panels=[[Panel([*curve_series(rows), limit_of(rows)])] for rows in groups],
        legend=[*(Entry(*curve_look(policy)) for policy in policies), Entry(LIMIT_NAME, LIMIT_LINE)],
        size=panel_size(len(groups), 1),
    )


def _named(rows: pl.DataFrame, name: str) -> str:
    value = rows[name][0]
    return value if name == "model" else f"{name} {value[:8] if name == 'trace' else value}"


def panel_size(rows: int, columns: int) -> tuple[float, float]:
    """Return the width and height in inches for a number of panels."""
    return 6.0 if columns == 1 else 3.0, 3.4 if rows == columns == 1 else 2.1
