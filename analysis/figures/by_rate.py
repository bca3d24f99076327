"""Latency against the rate of arrivals, a line per cache size."""

from __future__ import annotations

import polars as pl

from moereplay.analysis.figures.capacities import panel_size
from moereplay.analysis.figures.chart import Axis, Chart, Panel, legend, spans_a_decade
from moereplay.analysis.figures.facets import Facets, facets, joined, lines
from moereplay.analysis.palette import looks
from moereplay.results.errors import ResultError
from moereplay.results.read import runs, seconds_of
from moereplay.results.serving import figures, rate_of

WORDS = {"ttft": "TTFT from arrival", "tpot": "TPOT", "e2e": "end-to-end time from arrival"}
MEANING = {
    "ttft": "From a request's arrival to the end of its prompt, waiting for a slot included.",
    "tpot": "A request's decode time per decoded token.",
    "e2e": "From a request's arrival to its end, waiting for a slot included.",
}


def latency_by_rate(frame: pl.DataFrame, latency: str, percentile: str) -> Chart:
    """Draw a line per capacity, a panel per eviction policy and setting. Rows without arrivals are left out.

    Raises ResultError for fewer than two rates, or if no request has the latency.
    """
    arriving = frame.with_columns(_rates(frame)).filter(pl.col("rate").is_not_null())
    if arriving["rate"].n_unique() < 2:
        raise ResultError(
            "latency_by_rate needs two rates of arrivals or more; replay several, for example "
            "--passes batch:8 --arrivals poisson:1,poisson:2,poisson:4"
        )
    column, rates = f"{latency}_p{percentile}_ms", arriving["rate"]
    values = [figures(rows)[column] for rows in arriving["per_request"].to_list()]
    if not any(value is not None for value in values):
        raise ResultError(f"latency_by_rate: no request has a {latency.upper()}")
    results = arriving.drop("rate")
    tidy = runs(results).with_columns(rates, pl.Series("value", values, pl.Float64), arrivals=pl.lit("all"))
    found = facets(results, tidy)
    rows = found.rows.with_columns(_panel(found.policies).alias("panel"))
    panels = _panels(found)
    drawn, word = looks(found.capacities), f"p{percentile} {WORDS[latency]}"
    drawn = {capacity: drawn[capacity] for capacity in found.capacities}
    known = [value for value in values if value is not None]
    return Chart(
        title=f"{word} against the rate of arrivals",
        subtitle=found.shared,
        label=found.label,
        note=joined(
            f"{MEANING[latency]} p{percentile}: the smallest value that {percentile}% of the requests do not exceed.",
            f"A line per capacity. Seconds: {seconds_of(arriving)}.",
        ),
        x=Axis("requests per second", "number", scale="log" if spans_a_decade(rates.to_list()) else "linear"),
        y=Axis(f"{word}, ms", "number", scale="log", zero=False)
        if spans_a_decade(known) and min(known) > 0
        else Axis(f"{word}, ms", "number", zero=True),
        rows=panels,
        panels=[
            [Panel(lines(rows.filter(pl.col("panel") == panel), "rate", "value", drawn, by="capacity"))]
            for panel in panels
        ],
        legend=legend(drawn),
        size=panel_size(len(panels), 1),
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
