"""The numbers of a paper's figure: a row for each cell, or for each layer or lifetime of it, from stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from moereplay.analysis.metrics import measured, with_ratios
from moereplay.results.chart import BOUND, RELATIVE, Chart
from moereplay.results.counters import LIFETIME_BUCKETS
from moereplay.results.read import layers
from moereplay.results.settings import KINDS

#: What a live run must share with a replay for its perplexity to be that of the replay's policies.
ALIKE = ("capacity", "scope", "contract")
PLACE = ("model", "trace", "panel", "series", "x")  #: where a row stands in a figure


def rows_of(
    frame: pl.DataFrame, chart: Chart, cells: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]] = ()
) -> pl.DataFrame:
    """The rows of a chart: `PLACE`, the settings, and the columns of its values; null where one is undefined.

    `frame` is of `results.stored.load`; a cell is a mapping with its `identity`, series, x and panel and the trace's
    `layers`; `live` are documents of `moereplay live --json`.
    """
    places = pl.DataFrame([dict(cell) for cell in cells], infer_schema_length=None).with_row_index("at")
    found = {"run": _runs, "layer": _layers, "lifetime": _lifetimes}[chart.per](frame)
    settings = measured(frame).drop(set(found.columns) - {"identity"}, strict=False)
    rows = places.join(found, on="identity", how="left", maintain_order="left").join(settings, on="identity")
    rows = _with_perplexity(rows, frame, live) if chart.live else rows
    if chart.per != "run":
        rows = rows.with_columns(pl.col("place").alias("x")).drop("place")
    rows = _bounded(rows) if chart.bound else rows
    rows = _relative(rows, chart) if chart.relative_to else rows
    return rows.sort("at", maintain_order=True).drop("at")


def _runs(frame: pl.DataFrame) -> pl.DataFrame:
    """Every metric, and the three that papers state the other way round."""
    return measured(frame).select(
        pl.all(),
        pl.when(pl.col("accesses") > 0).then(pl.col("misses") / pl.col("accesses")).alias("miss_rate"),
        (1 - pl.col("mass_share_kept") + pl.col("mass_share_low_precision")).alias("mass_changed"),
    )


def _layers(frame: pl.DataFrame) -> pl.DataFrame:
    """Counters of both phases summed; `place` is the layer."""
    sums = layers(frame).group_by("identity", "layer", maintain_order=True)
    summed = sums.agg(pl.col("collisions", "misses", "accesses").sum()).sort("identity", "layer")
    return with_ratios(summed).with_columns(pl.col("layer").cast(pl.Float64).alias("place"))


def _lifetimes(frame: pl.DataFrame) -> pl.DataFrame:
    """`share` of evicted copies that stayed less than `place` passes; no rows where nothing was evicted."""
    counts = frame.select(
        pl.col("about").struct.field("identity"), pl.col("totals").struct.field("lifetime").alias("copies")
    )
    depth = layers(frame).group_by("identity").agg(pl.col("layer").max() + 1)
    buckets = pl.int_range(LIFETIME_BUCKETS).over("identity")
    per_bucket = counts.explode("copies").with_columns(buckets.alias("bucket")).join(depth, on="identity")
    below = pl.col("copies").cum_sum().over("identity") / pl.col("copies").sum().over("identity")
    shares = per_bucket.with_columns(below.alias("share"), (2 ** pl.col("bucket") / pl.col("layer")).alias("place"))
    before, after = (pl.col("share").shift(by).over("identity") for by in (1, -1))
    within = (before.fill_null(0) < 1) & (after.fill_null(1) > 0)  # one point at 0 and one at 100 % end a line
    return shares.filter(pl.col("share").is_finite() & within).select("identity", "place", "share")


def _bounded(rows: pl.DataFrame) -> pl.DataFrame:
    """With a row of Belady's misses for every row that has a bound; it changes no mixture."""
    bound = rows.drop_nulls("belady_hit_rate").with_columns(
        pl.lit(BOUND).alias("series"),
        (1 - pl.col("belady_hit_rate")).alias("miss_rate"),
        pl.lit(0.0).alias("mass_changed"),
    )
    return pl.concat([rows, bound])


def _relative(rows: pl.DataFrame, chart: Chart) -> pl.DataFrame:
    """Each value over that of the series it is compared with, in its panel, and at the same x if it has several."""
    base = rows.filter(pl.col("series") == chart.relative_to)
    keys = ["trace", "panel", *(["x"] if base["x"].n_unique() > 1 else [])]
    others = base.select(*keys, *(pl.col(name).alias(f"{name} of base") for name in chart.values))
    joined = rows.join(others, on=keys, how="left", maintain_order="left")
    quotients = [
        pl.when(pl.col(f"{name} of base") != 0)
        .then(pl.col(name) / pl.col(f"{name} of base"))
        .alias(f"{RELATIVE}_{name}")
        for name in chart.values
    ]
    return joined.with_columns(quotients).drop(f"{name} of base" for name in chart.values)


def _with_perplexity(rows: pl.DataFrame, frame: pl.DataFrame, live: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """`perplexity_change` of the live run under the same policies and cache, null without one."""
    known = {_key(document["about"]["policies"], document["config"]): _change(document) for document in live}
    policies = {each["identity"]: each["policies"] for each in frame["about"].to_list()}
    configs = {each["identity"]: config for each, config in zip(frame["about"], frame["config"], strict=True)}
    changes = [known.get(_key(policies[each], configs[each])) for each in rows["identity"]]
    return rows.with_columns(pl.Series("perplexity_change", changes, pl.Float64))


def _key(policies: Mapping[str, str], config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(policies[kind] for kind in KINDS), *(str(config[name]) for name in ALIKE))


def _change(document: Mapping[str, Any]) -> float | None:
    """Of the perplexity beside the unmodified model's; None if the run was not judged."""
    total = (document.get("quality") or {}).get("total")
    return total["perplexity"] / total["perplexity_base"] - 1 if total else None
