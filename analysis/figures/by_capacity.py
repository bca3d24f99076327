"""Figures over capacity (hit rate, TTFT, TPOT), and latency over the rate of arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from moereplay.analysis.checks import caption, ringed
from moereplay.analysis.comparisons import PARTS
from moereplay.analysis.figures import capacities
from moereplay.analysis.figures.capacities import panel_size
from moereplay.analysis.figures.chart import (
    OWN_SCALES,
    Axis,
    Chart,
    Entry,
    Panel,
    Point,
    Rule,
    Series,
    far_apart,
    legend,
    spans_a_decade,
)
from moereplay.analysis.figures.facets import Facets, bound_note, covered, facets, interval_note, joined, lines
from moereplay.analysis.figures.sheet import is_narrow
from moereplay.analysis.palette import DASHED, INK, Look, looks
from moereplay.results.errors import ResultError
from moereplay.results.read import runs, seconds_of
from moereplay.results.result import formula
from moereplay.results.serving import LATENCIES, Level, figures, rate_of, slowest
from moereplay.traces.units import MS

RING = Look(INK, "o", width=0, size=9.0, hollow=True)
HIT_RATE = "Hit rate: accesses whose expert was resident at look-up; a delayed hit (expert in flight) does not count."
COMPULSORY = "Compulsory limit: every first access of an expert misses, so no cache without prefetch hits more."
TTFT = {"ttft_mean_ms": "mean TTFT", "ttft_median_ms": "median TTFT"}
#: Of time per output token, a column of panels each.
TPOT = {"tpot_ms": "TPOT, ms", "tokens_per_s": "tokens/s, of one request"}


def hit_rate_by_capacity(frame: pl.DataFrame, curves: pl.DataFrame | None = None) -> Chart:
    """Draw a line per eviction policy with bounds; a panel per setting.

    Where `curves` hold for a panel, their lines replace those between points, Belady's included. Raises ResultError for
    a single capacity without a curve.
    """
    found = capacities.with_percents(frame, "hit_rate")
    panels = [found.panel(setting) for setting in found.settings]
    behind = [capacities.behind(curves, panel) for panel in panels]
    curved = not all(each.is_empty() for each in behind)
    if not curved:
        capacities.check_several(found, "hit_rate_by_capacity")
    marked = ringed(frame, "hit_rate")
    legend_of = _hit_rate_legend(found, behind)
    note = [
        HIT_RATE,
        COMPULSORY * (capacities.LIMIT_NAME in [entry.name for entry in legend_of]),
        capacities.meaning(found.rows),
        bound_note(frame),
        covered(frame),
        interval_note(frame),
        *dict.fromkeys(map(capacities.counted_at, behind)),
        *dict.fromkeys(map(capacities.dots_of, behind)),
    ]
    return Chart(
        title="Hit rate against capacity",
        subtitle=found.shared,
        label=found.label,
        note=joined(*note, caption(frame, "hit_rate")),
        x=capacities.capacity_axis(found.rows, behind),
        y=Axis("hit rate", "share", zero=True),
        rows=found.settings,
        panels=[[_hit_rates(panel, each, found, marked)] for panel, each in zip(panels, behind, strict=True)],
        legend=[*legend_of, *_ring_entry(marked)],
        size=panel_size(len(panels), 1),
        names_hidden=True,
    )


def _hit_rates(panel: pl.DataFrame, curves: pl.DataFrame, found: Facets, marked: Sequence[str]) -> Panel:
    known = set(curves["policy"])
    drawn = [
        replace(each, joined=each.name not in known)
        for each in lines(panel, "percent", "hit_rate", looks(found.policies))
    ]
    bounds = capacities.bounds(panel, points="belady" in known)
    if known:
        bounds = [each for each in bounds if each.name != capacities.LIMIT_NAME] + [capacities.limit_of(curves)]
    return Panel([*drawn, *capacities.curve_series(curves), *bounds, *_rings(panel, "hit_rate", marked)])


def _hit_rate_legend(found: Facets, behind: Sequence[pl.DataFrame]) -> list[Entry]:
    curved = {policy for each in behind for policy in each["policy"]}
    known = {name: found.rows[name].drop_nulls().len() > 0 for name in ("belady_hit_rate", "compulsory_limit")}
    limit = [Entry(capacities.LIMIT_NAME, capacities.LIMIT_LINE)] if known["compulsory_limit"] or curved else []
    names = [*sorted(curved - {"belady"}), *["belady"] * (known["belady_hit_rate"] or "belady" in curved)]
    everywhere = {name for name in curved if all(name in set(each["policy"]) for each in behind)}
    replayed = [
        Entry(name, replace(look, width=0) if name in everywhere else look)
        for name, look in legend(looks(found.policies))
        if not isinstance(look, str)
    ]
    return [*replayed, *(Entry(*capacities.curve_look(name)) for name in names), *limit]


def ttft_by_capacity(frame: pl.DataFrame, latency: str) -> Chart:
    """Draw a line per eviction policy, a panel per setting; requests without a prompt have no TTFT.

    Raises ResultError for a single capacity, or if no request has a prompt.
    """
    found = capacities.with_percents(frame, *[latency] * (latency in PARTS))
    capacities.check_several(found, "ttft_by_capacity")
    if found.rows[latency].drop_nulls().is_empty():
        raise ResultError(
            "no TTFT: no request has a prompt; replay a trace of prompts, for example of: "
            "moereplay record MODEL --prompts FILE --out TRACE"
        )
    drawn, marked, word = looks(found.policies), ringed(frame, "ttft_ms"), TTFT[latency]
    note = [
        f"{word}: {formula(latency)}. Seconds: {seconds_of(frame)}.",
        capacities.meaning(found.rows),
        interval_note(frame) if latency in PARTS else "No intervals: they exist for means only.",
        _constant(found.rows, latency),
        caption(frame, "ttft_ms"),
    ]
    panels = [[_over_capacity(found.panel(setting), latency, drawn, marked)] for setting in found.settings]
    own = far_apart(panels)
    return Chart(
        title=f"{word[0].upper()}{word[1:]} against capacity",
        subtitle=found.shared,
        label=found.label,
        note=joined(*note, OWN_SCALES * own),
        x=capacities.capacity_axis(found.rows),
        y=Axis(f"{word}, ms", "number", zero=True),  # from zero, so that lengths compare
        rows=found.settings,
        panels=panels,
        legend=[*legend(drawn), *_ring_entry(marked)],
        size=panel_size(len(found.settings), 1),
        scales="each" if own else "one",
        names_hidden=True,
    )


def _constant(rows: pl.DataFrame, latency: str) -> str:
    each = rows.group_by("setting", "eviction").agg((pl.col(latency).max() - pl.col(latency).min()).alias("spread"))
    return "" if each["spread"].drop_nulls().max() else "It does not depend on the capacity."


def tpot_by_capacity(frame: pl.DataFrame) -> Chart:
    """Draw a line per eviction policy; a row of panels per setting, columns for milliseconds and tokens per second.

    Raises ResultError for a single capacity, or if nothing was decoded.
    """
    found = capacities.with_percents(frame, *TPOT)
    capacities.check_several(found, "tpot_by_capacity")
    if found.rows["tpot_ms"].drop_nulls().is_empty():
        raise ResultError(
            "no TPOT: no pass decodes; replay a trace of decoded tokens, for example of: "
            "moereplay record MODEL --prompts FILE --max-new-tokens 64 --out TRACE"
        )
    drawn, marked = looks(found.policies), ringed(frame, "tpot_ms")
    note = [
        f"Decode passes only. TPOT: {formula('tpot_ms')}. tokens/s: its inverse.",
        f"Seconds: {seconds_of(frame)}.",
        capacities.meaning(found.rows),
        interval_note(frame),
        caption(frame, "tpot_ms"),
    ]
    panels = [
        [_over_capacity(found.panel(setting), metric, drawn, marked) for metric in TPOT] for setting in found.settings
    ]
    columns, rows, own = list(TPOT.values()), found.settings, far_apart(panels)
    if is_narrow():  # one below the other
        rows = [f"{title}{', ' * bool(setting)}{setting}" for setting in found.settings for title in columns]
        columns, panels = [""], [[panel] for row in panels for panel in row]
    return Chart(
        title="Time per output token against capacity",
        subtitle=found.shared,
        label=found.label,
        note=joined(*note, OWN_SCALES * own),
        x=capacities.capacity_axis(found.rows),
        y=Axis("", "number", zero=True),
        columns=columns,
        rows=rows,
        panels=panels,
        legend=[*legend(drawn), *_ring_entry(marked)],
        size=panel_size(len(found.settings), len(TPOT)),
        scales="each" if own or is_narrow() else "columns",
        names_hidden=True,
    )


def _over_capacity(panel: pl.DataFrame, metric: str, drawn: dict[str, Look], marked: Sequence[str]) -> Panel:
    return Panel([*lines(panel, "percent", metric, drawn), *_rings(panel, metric, marked)])


def _rings(panel: pl.DataFrame, metric: str, marked: Sequence[str]) -> list[Series]:
    """Circle the points of checked configurations."""
    rows = panel.filter(pl.col("identity").is_in(list(marked))).select("percent", metric)
    points = [Point(*row) for row in rows.iter_rows()]
    return [Series("", RING, points, joined=False, measured=False)] if points else []


def _ring_entry(marked: Sequence[str]) -> list[Entry]:
    return [Entry("checked", RING)] if marked else []


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
    found = facets(results, runs(results).with_columns(rates, *columns, arrivals=pl.lit("all")))
    rows = found.rows.with_columns(_panel(found.policies).alias("panel"))
    drawn = looks(found.capacities)
    drawn = {capacity: drawn[capacity] for capacity in found.capacities}
    limits = {name: [Rule(level.most[name] / MS, SLO, "SLO")] if level and name in level.most else [] for name in shown}
    titles = [f"p{percentile} {WORDS[name]}, ms" for name in shown]

    def panel(heading: str, name: str) -> Panel:
        far = spans_a_decade(known[name]) and min(known[name]) > 0
        y = Axis("", "number", scale="log" if far else "linear", zero=not far)
        here = lines(rows.filter(pl.col("panel") == heading), "rate", name, drawn, by="capacity")
        return Panel(here, rules=limits[name], y=y)

    headings = _panels(found)
    panels = [[panel(heading, name) for name in shown] for heading in headings]
    if is_narrow():  # one below the other
        headings = [", ".join(filter(None, (title, heading))) for heading in headings for title in titles]
        titles, panels = [""], [[each] for row in panels for each in row]
    return Chart(
        title=f"p{percentile} of latencies against the rate of arrivals",
        subtitle=found.shared,
        label=found.label,
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
        scales="each" if is_narrow() else "columns",
        names_hidden=True,
    )


def arrives(frame: pl.DataFrame) -> bool:
    """Return True if any of these rows has a rate of arrivals."""
    return "config" in frame.columns and _rates(frame).drop_nulls().len() > 0


def _rates(frame: pl.DataFrame) -> pl.Series:
    config = frame["config"].struct
    arrivals = config.field("arrivals").to_list() if "arrivals" in config.fields else [None] * len(frame)
    return pl.Series("rate", [rate_of(text) for text in arrivals], pl.Float64)


def _panels(found: Facets) -> list[str]:
    """Return the headings of all panels: by eviction policy, then by setting, in the order of other figures."""
    if len(found.policies) == 1:
        return found.settings
    drawn = set(found.rows.select("eviction", "setting").rows())
    every = [(policy, setting) for policy in found.policies for setting in found.settings]
    return [", ".join(filter(None, pair)) for pair in every if pair in drawn]


def _panel(policies: list[str]) -> pl.Expr:
    """Return the heading of a panel: its eviction policy if there are several, and its setting."""
    if len(policies) == 1:
        return pl.col("setting")
    some = pl.when(pl.col("setting") == "").then(pl.lit("")).otherwise(pl.lit(", "))
    return pl.concat_str("eviction", some, "setting")
