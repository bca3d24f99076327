"""Figures over capacity (hit rate, TTFT, TPOT) with bounds and curves, and latency over the rate of arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import polars as pl

from moereplay.analysis.comparisons import PARTS
from moereplay.analysis.figures.chart import (
    OWN_SCALES,
    Axis,
    Chart,
    Entry,
    Panel,
    Point,
    Rule,
    Series,
    Tick,
    far_apart,
    legend,
    spans_a_decade,
)
from moereplay.analysis.figures.facets import Facets, facets, joined, lines, panel_size
from moereplay.analysis.metrics import measured
from moereplay.analysis.palette import BOUND, DASH_DOTTED, DASHED, DOTTED, INK, LIMIT, Look, look_of, looks
from moereplay.results.counters import COUNTERS
from moereplay.results.curves import TIDY
from moereplay.results.errors import ResultError
from moereplay.results.read import runs, seconds_of
from moereplay.results.remarks import one_label
from moereplay.results.result import formula
from moereplay.results.serving import LATENCIES, Level, figures, rate_of, slowest
from moereplay.results.settings import OF_CURVES
from moereplay.traces.drafts import OFF
from moereplay.traces.texts import digits
from moereplay.traces.units import MS

RING = Look(INK, "o", width=0, size=9.0, hollow=True)
HIT_RATE = "Hit rate: accesses whose expert was resident at look-up; a delayed hit (expert in flight) does not count."
COMPULSORY = "Compulsory limit: every first access of an expert misses, so no cache without prefetch hits more."
TTFT = {"ttft_mean_ms": "mean TTFT", "ttft_median_ms": "median TTFT"}
#: Of complete steps, and of time per output token: a column of panels each.
COMPLETE = {"hit_rate": "hit rate of experts", "complete_share": "complete steps"}
TPOT = {"tpot_ms": "TPOT, ms", "tokens_per_s": "tokens/s, of one request"}
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


def hit_rate_by_capacity(frame: pl.DataFrame, curves: pl.DataFrame | None = None) -> Chart:
    """Draw a line per eviction policy with bounds; a panel per setting.

    Where `curves` hold for a panel, their lines replace those between points, Belady's included. Raises ResultError for
    a single capacity without a curve.
    """
    laid = _over_capacities(frame, ["hit_rate"], "hit_rate")
    panels = [laid.panel(setting) for setting in laid.settings]
    under = [behind(curves, panel) for panel in panels]
    if all(each.is_empty() for each in under):
        _check_several(laid, "hit_rate_by_capacity")
    entries = _hit_rate_legend(laid, under)
    note = [
        HIT_RATE,
        COMPULSORY * (LIMIT_NAME in [entry.name for entry in entries]),
        _meaning(laid.rows),
        laid.bound,
        laid.covered,
        laid.intervals,
        *dict.fromkeys(map(_counted_at, under)),
        *dict.fromkeys(map(dots_of, under)),
        laid.checked,
    ]
    return replace(
        _against_capacity(
            laid, "Hit rate", note, [[_hit_rates(*each, laid)] for each in zip(panels, under, strict=True)]
        ),
        x=_capacity_axis(laid.rows, under),
        y=Axis("hit rate", "share", zero=True),
        legend=[*entries, *_ring_entry(laid)],
    )


def _against_capacity(
    laid: Facets, what: str, note: Sequence[str], panels: Sequence[Sequence[Panel]], columns: Sequence[str] = ("",)
) -> Chart:
    """Return a figure of a line per eviction policy over capacity, a row per setting."""
    return Chart(
        title=f"{what} against capacity",
        subtitle=laid.shared,
        label=laid.label,
        note=joined(*note),
        x=_capacity_axis(laid.rows),
        columns=columns,
        rows=laid.settings,
        panels=panels,
        legend=[*legend(looks(laid.policies)), *_ring_entry(laid)],
        size=panel_size(len(panels), len(columns)),
        names_hidden=True,
        stacks=True,
    )


def _hit_rates(panel: pl.DataFrame, curves: pl.DataFrame, laid: Facets) -> Panel:
    curved = set(curves["policy"])
    drawn = [
        replace(line, joined=line.name not in curved)
        for line in lines(panel, "percent", "hit_rate", looks(laid.policies))
    ]
    limits = bounds(panel, points="belady" in curved)
    if curved:
        limits = [line for line in limits if line.name != LIMIT_NAME] + [_limit_of(curves)]
    return Panel([*drawn, *curve_series(curves), *limits, *_rings(panel, "hit_rate", laid)])


def _hit_rate_legend(laid: Facets, behind: Sequence[pl.DataFrame]) -> list[Entry]:
    curved = {policy for curves in behind for policy in curves["policy"]}
    bounded, limited = (laid.rows[name].drop_nulls().len() > 0 for name in ("belady_hit_rate", "compulsory_limit"))
    limit = [Entry(LIMIT_NAME, LIMIT_LINE)] if limited or curved else []
    names = [*sorted(curved - {"belady"}), *["belady"] * (bounded or "belady" in curved)]
    everywhere = {name for name in curved if all(name in set(curves["policy"]) for curves in behind)}
    replayed = [
        Entry(name, replace(look, width=0) if name in everywhere else look)
        for name, look in legend(looks(laid.policies))
        if not isinstance(look, str)
    ]
    return [*replayed, *(Entry(*_curve_look(name)) for name in names), *limit]


def ttft_by_capacity(frame: pl.DataFrame, latency: str) -> Chart:
    """Draw a line per eviction policy, a panel per setting; requests without a prompt have no TTFT.

    Raises ResultError for a single capacity, or if no request has a prompt.
    """
    laid, word = _over_capacities(frame, [latency] * (latency in PARTS), "ttft_ms"), TTFT[latency]
    _check_several(laid, "ttft_by_capacity")
    if laid.rows[latency].drop_nulls().is_empty():
        raise ResultError(
            "no TTFT: no request has a prompt; replay a trace of prompts, for example of: "
            "moereplay record MODEL --prompts FILE --out TRACE"
        )
    ends = pl.col(latency).max() - pl.col(latency).min()
    spread = laid.rows.group_by("setting", "eviction").agg(ends.alias("spread"))["spread"].drop_nulls().max()
    panels = [[_over_capacity(laid, setting, latency)] for setting in laid.settings]
    own = far_apart(panels)
    note = [
        f"{word}: {formula(latency)}. Seconds: {seconds_of(frame)}.",
        _meaning(laid.rows),
        laid.intervals if latency in PARTS else "No intervals: they exist for means only.",
        "" if spread else "It does not depend on the capacity.",
        laid.checked,
        OWN_SCALES * own,
    ]
    return replace(
        _against_capacity(laid, f"{word[0].upper()}{word[1:]}", note, panels),
        y=Axis(f"{word}, ms", "number", zero=True),  # from zero, so that lengths compare
        scales="each" if own else "one",
    )


def tpot_by_capacity(frame: pl.DataFrame) -> Chart:
    """Draw a line per eviction policy; a row of panels per setting, columns for milliseconds and tokens per second.

    Raises ResultError for a single capacity, or if nothing was decoded.
    """
    laid = _over_capacities(frame, list(TPOT), "tpot_ms")
    _check_several(laid, "tpot_by_capacity")
    if laid.rows["tpot_ms"].drop_nulls().is_empty():
        raise ResultError(
            "no TPOT: no pass decodes; replay a trace of decoded tokens, for example of: "
            "moereplay record MODEL --prompts FILE --max-new-tokens 64 --out TRACE"
        )
    panels = [[_over_capacity(laid, setting, metric) for metric in TPOT] for setting in laid.settings]
    own = far_apart(panels)
    note = [
        f"Decode passes only. TPOT: {formula('tpot_ms')}. tokens/s: its inverse.",
        f"Seconds: {seconds_of(frame)}.",
        _meaning(laid.rows),
        laid.intervals,
        laid.checked,
        OWN_SCALES * own,
    ]
    return replace(
        _against_capacity(laid, "Time per output token", note, panels, list(TPOT.values())),
        y=Axis("", "number", zero=True),
        scales="each" if own else "columns",
    )


def complete_by_capacity(frame: pl.DataFrame) -> Chart:
    """Draw a line per eviction policy; a row of panels per setting, columns for the shares of experts and of steps.

    Raises ResultError for a single capacity, or if the results do not count complete steps.
    """
    laid = _over_capacities(frame, ["hit_rate"])
    _check_several(laid, "complete_by_capacity")
    if laid.rows["complete_share"].drop_nulls().is_empty():
        raise ResultError("no complete steps: the results were made before they were counted; replay them again")
    note = [
        f"Complete: {COUNTERS['complete_steps'].definition}. {HIT_RATE}",
        _meaning(laid.rows),
        f"{laid.intervals} Complete steps have none: a step of several requests belongs to none of them.",
        laid.checked,
    ]
    panels = [[_over_capacity(laid, setting, metric) for metric in COMPLETE] for setting in laid.settings]
    return replace(
        _against_capacity(laid, "Experts and whole steps that are there", note, panels, list(COMPLETE.values())),
        y=Axis("", "share", zero=True),
    )


def _over_capacity(laid: Facets, setting: str, metric: str) -> Panel:
    panel = laid.panel(setting)
    return Panel([*lines(panel, "percent", metric, looks(laid.policies)), *_rings(panel, metric, laid)])


def _rings(panel: pl.DataFrame, metric: str, laid: Facets) -> list[Series]:
    """Circle the points of checked configurations."""
    rows = panel.filter(pl.col("identity").is_in(laid.marked)).select("percent", metric)
    points = [Point(*row) for row in rows.iter_rows()]
    return [Series("", RING, points, joined=False, measured=False)] if points else []


def _ring_entry(laid: Facets) -> list[Entry]:
    return [Entry("checked", RING)] if laid.marked else []


# The axis of capacities


def _over_capacities(frame: pl.DataFrame, figures: Sequence[str] = (), checked: str = "hit_rate") -> Facets:
    """Lay out the configurations with metrics, intervals of `figures`, and `percent`: capacity of all expert bytes."""
    return facets(frame, measured(frame, figures).with_columns(PERCENT), checked)


def _check_several(laid: Facets, figure: str) -> None:
    """Raises ResultError if all rows have one capacity."""
    if laid.rows["percent"].n_unique() < 2:
        raise ResultError(
            f"{figure} needs two capacities or more, found {', '.join(laid.capacities)}; "
            "replay several, for example --capacity 1%,5%,25%"
        )


def _capacity_axis(rows: pl.DataFrame, behind: Sequence[pl.DataFrame] = ()) -> Axis:
    """Return the axis of replayed capacities, with round ones where a curve goes beyond them."""
    replayed, word = rows["percent"].unique().sort().to_list(), _worded(rows)
    reached = [*replayed, *(at for lines in behind for at in lines["percent"])]
    ends = min(reached), max(reached)
    more = [tick for tick in ROUND if ends[0] <= tick < replayed[0] or replayed[-1] < tick <= ends[1]]
    scale = "log" if spans_a_decade(ends) else "linear"
    ticks, further = ([Tick(at, word(at)) for at in places] for places in (replayed, more))
    return Axis("capacity", scale=scale, ticks=ticks, more_ticks=further)


def _meaning(rows: pl.DataFrame) -> str:
    """Return a sentence that explains the ticks."""
    return "Capacity: of all expert bytes." if _unit_of(rows) in ("%", "") else "Capacity: of experts, as typed."


def _unit_of(rows: pl.DataFrame) -> str:
    """Return the unit of every capacity as typed; empty for several units, or models of several sizes."""
    units = {text.lstrip("0123456789.") for text in rows["capacity"]}
    places = rows.select("percent", "capacity").drop_nulls()
    numbers = ("".join(takewhile(lambda letter: letter in "0123456789.", text)) or 0 for text in places["capacity"])
    wholes = [float(number) / percent for percent, number in zip(places["percent"], numbers, strict=True) if percent]
    alike = len(units) == 1 and wholes and max(wholes) <= ALIKE * min(wholes)
    return units.pop() if alike else ""


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


def _curve_look(policy: str) -> tuple[str, Look]:
    """Return the name and look of the curve of a policy."""
    if policy == "belady":
        return BELADY_NAME, BELADY
    if policy == "relaxed_belady":
        return "Belady, relaxed", Look(BOUND, dash=DASH_DOTTED)
    return f"{policy} at every capacity", Look(look_of(policy).colour)


def _is_dotted(policy: str, many: int) -> bool:
    """Return whether a curve is a bound that was counted at a few capacities, as experts differ in bytes."""
    return policy == "relaxed_belady" and many <= FEW


def _counted_at(curves: pl.DataFrame) -> str:
    """Return the sentences on the capacities of curves, and on the gaps that they have; empty without a curve."""
    gaps = f" {GAPS}" if curves["hit_rate"].null_count() else ""
    return "" if curves.is_empty() else f"{EVERY_CAPACITY}{gaps}"


def dots_of(curves: pl.DataFrame) -> str:
    """Return the sentence on a bound's dots; empty if no curve has any."""
    many = curves.group_by("policy", "identity").len()
    return DOTS if any(_is_dotted(*row) for row in many.select("policy", "len").iter_rows()) else ""


def curve_series(curves: pl.DataFrame, most: int = 0) -> list[Series]:
    """Return a line per curve of `results.curves.load`, with a gap where hit rates are null.

    Settings that vary among the curves are part of the names. With `most`, lines are thinned to about that many points.
    """
    varying = [name for name in (*OF_CURVES, "seed") if curves[name].n_unique() > 1]
    found = []
    for _, rows in curves.sort("percent").group_by("policy", "identity", maintain_order=True):
        thin = rows.gather_every(max(1, len(rows) // most)) if most else rows
        points = [Point(*row) for row in thin.select("percent", "hit_rate").iter_rows()]
        name, look = _curve_look(rows["policy"][0])
        if _is_dotted(rows["policy"][0], len(rows)):
            look = replace(look, marker="o", size=3.0)
        unlike = "".join(f", {each} {rows[each][0]}" for each in varying)
        found.append(Series(f"{name}{unlike}", look, points, measured=False))
    return found


def _limit_of(curves: pl.DataFrame) -> Series:
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
    laid = _over_capacities(frame)
    used = {name for setting in laid.settings for name in behind(curves, laid.panel(setting))["identity"]}
    left = curves.filter(~pl.col("identity").is_in(used)).unique("identity").sort("policy", "identity")
    many = f"{len(left)} of {curves['identity'].n_unique()} curves match no replay"
    names = dict.fromkeys(f"{row['policy']}{_foreign(row, laid.rows)}" for row in left.iter_rows(named=True))
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
        note=joined(_counted_at(curves), dots_of(curves), CURVES_NOTE),
        x=Axis("capacity", scale="log", ticks=[Tick(tick, f"{tick:g}%") for tick in ROUND if tick >= lowest]),
        y=Axis("hit rate", "share", zero=True),
        rows=[", ".join(_named(rows, name) for name in varying) for rows in groups],
        panels=[[Panel([*curve_series(rows), _limit_of(rows)])] for rows in groups],
        legend=[*(Entry(*_curve_look(policy)) for policy in policies), Entry(LIMIT_NAME, LIMIT_LINE)],
        size=panel_size(len(groups), 1),
    )


def _named(rows: pl.DataFrame, name: str) -> str:
    value = rows[name][0]
    return value if name == "model" else f"{name} {value[:8] if name == 'trace' else value}"


# -- Latency against the rate of arrivals, a line per cache size


#: Latencies from the rows of requests: what each is, and its meaning.
WORDS = {"ttft": "TTFT from arrival", "tpot": "TPOT", "e2e": "end to end"}
MEANING = {
    "ttft": "TTFT: from a request's arrival to the end of its prompt, waiting for a slot included.",
    "tpot": "TPOT: a request's decode time per decoded token.",
    "e2e": "End to end: from a request's arrival to its end, waiting for a slot included.",
}
SLO = Look(INK, dash=DASHED, width=1.0)


def latency_by_rate(frame: pl.DataFrame, percentile: str, level: Level | None = None) -> Chart:
    """Draw a line per capacity; a column of panels per latency, a row per eviction policy and setting.

    The limits of a service level are dashed. Rows without arrivals are left out. Raises ResultError for fewer than two
    rates.
    """
    arriving = frame.with_columns(_rates(frame)).filter(pl.col("rate").is_not_null())
    if arriving["rate"].n_unique() < 2:
        raise ResultError(
            "latency_by_rate needs two rates of arrivals or more; replay several, for example "
            "--passes batch:8 --arrivals poisson:1,poisson:2,poisson:4"
        )
    rates, every = arriving["rate"], [figures(rows) for rows in arriving["per_request"].to_list()]
    values = {name: [each[f"{name}_p{percentile}_ms"] for each in every] for name in LATENCIES}
    known = {name: [each for each in column if each is not None] for name, column in values.items()}
    shown = [name for name in LATENCIES if known[name]]
    results = arriving.drop("rate")
    columns = [pl.Series(name, values[name], pl.Float64) for name in shown]
    laid = facets(results, runs(results).with_columns(rates, *columns, arrivals=pl.lit("all")))
    several, comma = len(laid.policies) > 1, pl.when(pl.col("setting") == "").then(pl.lit("")).otherwise(pl.lit(", "))
    heading_of = pl.concat_str("eviction", comma, "setting") if several else pl.col("setting")
    rows = laid.rows.with_columns(heading_of.alias("panel"))
    drawn = looks(laid.capacities)
    drawn = {capacity: drawn[capacity] for capacity in laid.capacities}
    limits = {name: [Rule(level.most[name] / MS, SLO, "SLO")] if level and name in level.most else [] for name in shown}
    titles = [f"p{percentile} {WORDS[name]}, ms" for name in shown]

    def panel(heading: str, name: str) -> Panel:
        far = spans_a_decade(known[name]) and min(known[name]) > 0
        y = Axis("", "number", scale="log" if far else "linear", zero=not far)
        here = lines(rows.filter(pl.col("panel") == heading), "rate", name, drawn, by="capacity")
        return Panel(here, rules=limits[name], y=y)

    headings = _panels(laid)
    panels = [[panel(heading, name) for name in shown] for heading in headings]
    return Chart(
        title=f"p{percentile} of latencies against the rate of arrivals",
        subtitle=laid.shared,
        label=laid.label,
        note=joined(
            *(MEANING[name] for name in shown),
            f"p{percentile}: the smallest value that {percentile}% of the requests do not exceed.",
            slowest(min(map(len, arriving["per_request"])), [int(percentile)], "."),
            f"A line per capacity. Seconds: {seconds_of(arriving)}.",
            f"Dashed: the SLO, {level.in_words}." if level and any(limits.values()) else "",
        ),
        x=Axis("requests per second", "number", scale="log" if spans_a_decade(rates.to_list()) else "linear"),
        columns=titles,
        rows=headings,
        panels=panels,
        legend=[*legend(drawn), *[Entry("SLO", SLO)] * any(limits.values())],
        size=panel_size(len(headings), len(titles)),
        scales="columns",
        names_hidden=True,
        stacks=True,
    )


def arrives(frame: pl.DataFrame) -> bool:
    """Return True if any of these rows has a rate of arrivals."""
    return "config" in frame.columns and _rates(frame).drop_nulls().len() > 0


def _rates(frame: pl.DataFrame) -> pl.Series:
    config = frame["config"].struct
    arrivals = config.field("arrivals").to_list() if "arrivals" in config.fields else [None] * len(frame)
    return pl.Series("rate", [rate_of(text) for text in arrivals], pl.Float64)


def _panels(laid: Facets) -> list[str]:
    """Return the headings of all panels: by eviction policy, then by setting, in the order of other figures."""
    if len(laid.policies) == 1:
        return laid.settings
    drawn = set(laid.rows.select("eviction", "setting").rows())
    every = [(policy, setting) for policy in laid.policies for setting in laid.settings]
    return [", ".join(filter(None, pair)) for pair in every if pair in drawn]
