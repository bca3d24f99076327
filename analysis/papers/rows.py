"""Numbers of a paper's figure from stored results, one row per cell, layer or lifetime; tables and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.analysis.forecast_fit import mass_changed, mass_rounded
from moereplay.analysis.metrics import measured, with_ratios
from moereplay.analysis.tables import DIGITS, csv, table
from moereplay.results.chart import BOUND, RELATIVE, Chart
from moereplay.results.counters import LIFETIME_BUCKETS
from moereplay.results.errors import ResultError
from moereplay.results.read import layers
from moereplay.results.settings import KINDS
from moereplay.traces.files import write_whole

#: Settings that a live run shares with the replay that its perplexity belongs to.
ALIKE = ("capacity", "scope", "contract")
PLACE = ("model", "trace", "panel", "series", "x")  #: place of a row in a figure


def rows_of(
    frame: pl.DataFrame, chart: Chart, cells: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]] = ()
) -> pl.DataFrame:
    """Return the rows of a chart: `PLACE`, settings, and values; null where a value is undefined.

    `frame` comes from `results.stored.load`. A cell has its `identity`, series, x and panel, and the trace's `layers`.
    `live` are documents of `moereplay live --json`.
    """
    places = pl.DataFrame([dict(cell) for cell in cells], infer_schema_length=None).with_row_index("at")
    found = {"run": _runs, "layer": _layers, "lifetime": _lifetimes}[chart.per](frame)
    settings = measured(frame).drop(set(found.columns) - {"identity"}, strict=False)
    rows = places.join(found, on="identity", how="left", maintain_order="left").join(settings, on="identity")
    rows = _with_changed(rows, frame) if chart.per == "run" else rows
    rows = _with_perplexity(rows, frame, live) if chart.live else rows
    if chart.per != "run":
        rows = rows.with_columns(pl.col("place").alias("x")).drop("place")
    rows = _bounded(rows) if chart.bound else rows
    rows = _relative(rows, chart) if chart.relative_to else rows
    return rows.sort("at", maintain_order=True).drop("at")


def _runs(frame: pl.DataFrame) -> pl.DataFrame:
    """Return every metric, and the miss rate."""
    return measured(frame).select(
        pl.all(),
        pl.when(pl.col("accesses") > 0).then(pl.col("misses") / pl.col("accesses")).alias("miss_rate"),
    )


def _with_changed(rows: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """Add `mass_changed`, and the part of it that is rounding; null without gate weights."""
    miss = {about["identity"]: about["policies"]["miss"] for about in frame["about"]}
    arguments = [(row, miss[row["identity"]], row["stored_bits"]) for row in rows.iter_rows(named=True)]
    columns = {"mass_changed": mass_changed, "mass_rounded": mass_rounded}
    added = [pl.Series(name, [share(*given) for given in arguments], pl.Float64) for name, share in columns.items()]
    return rows.with_columns(added).drop("stored_bits")


def _layers(frame: pl.DataFrame) -> pl.DataFrame:
    """Sum the counters of both phases; `place` is the layer."""
    sums = layers(frame).group_by("identity", "layer", maintain_order=True)
    summed = sums.agg(pl.col("collisions", "misses", "accesses").sum()).sort("identity", "layer")
    miss_rate = (pl.col("misses") / pl.col("accesses")).alias("miss_rate")
    return with_ratios(summed).with_columns(miss_rate, pl.col("layer").cast(pl.Float64).alias("place"))


def _lifetimes(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the `share` of evicted copies that stayed less than `place` passes; no rows without evictions."""
    counts = frame.select(
        pl.col("about").struct.field("identity"), pl.col("totals").struct.field("lifetime").alias("copies")
    )
    depth = layers(frame).group_by("identity").agg(pl.col("layer").max() + 1)
    buckets = pl.int_range(LIFETIME_BUCKETS).over("identity")
    per_bucket = counts.explode("copies").with_columns(buckets.alias("bucket")).join(depth, on="identity")
    below = pl.col("copies").cum_sum().over("identity") / pl.col("copies").sum().over("identity")
    shares = per_bucket.with_columns(below.alias("share"), (2 ** pl.col("bucket") / pl.col("layer")).alias("place"))
    before, after = (pl.col("share").shift(by).over("identity") for by in (1, -1))
    within = (before.fill_null(0) < 1) & (after.fill_null(1) > 0)  # a line ends with one point at 0 and one at 100 %
    return shares.filter(pl.col("share").is_finite() & within).select("identity", "place", "share")


def _bounded(rows: pl.DataFrame) -> pl.DataFrame:
    """Add a row of Belady's misses for every row that has the bound."""
    bound = rows.drop_nulls("belady_hit_rate").with_columns(
        pl.lit(BOUND).alias("series"),
        (1 - pl.col("belady_hit_rate")).alias("miss_rate"),
        pl.lit(0.0).alias("mass_changed"),
    )
    return pl.concat([rows, bound])


def _relative(rows: pl.DataFrame, chart: Chart) -> pl.DataFrame:
    """Divide each value by the base series' value in its panel and, if the base varies over x, at its x."""
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
    """Add `perplexity_change` of the live run under the same policies and cache; null without one."""
    known = {_key(document["about"]["policies"], document["config"]): _change(document) for document in live}
    policies = {each["identity"]: each["policies"] for each in frame["about"].to_list()}
    configs = {each["identity"]: config for each, config in zip(frame["about"], frame["config"], strict=True)}
    changes = [known.get(_key(policies[each], configs[each])) for each in rows["identity"]]
    return rows.with_columns(pl.Series("perplexity_change", changes, pl.Float64))


def _key(policies: Mapping[str, str], config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(policies[kind] for kind in KINDS), *(str(config[name]) for name in ALIKE))


def _change(document: Mapping[str, Any]) -> float | None:
    total = (document.get("quality") or {}).get("total")
    return total["perplexity"] / total["perplexity_base"] - 1 if total else None


# Tables with published numbers

#: Columns of published numbers: the column they compare with, range, place in the figure, model, and source.
PUBLISHED = ("value", "low", "high", *PLACE, "of", "source")
#: Parts of `mass_changed`, in columns of their own.
PARTS = ("mass_share_dropped", "mass_share_substituted", "mass_rounded")
#: Heads of columns.
HEADS = {
    "mass_share_dropped": "dropped",
    "mass_share_substituted": "replaced",
    "mass_rounded": "rounded",
    "collisions_per_miss": "coll/miss",
    "collisions_per_access": "coll/access",
    "relative_collisions": "times",
    "ttft_mean_ms": "TTFT ms",
    "tokens_per_s": "tok/s",
    "relative_ttft_mean_ms": "TTFT / own",
}
#: Short heads, for published numbers of two columns.
SHORT = {"ttft_mean_ms": "TTFT", "tokens_per_s": "tok/s"}


def published_frame(marks: Sequence[Mapping[str, Any]], rows: pl.DataFrame) -> pl.DataFrame:
    """Return published numbers as a frame whose `x` has the type of the figure's rows."""
    numbers: dict[str, Any] = dict.fromkeys(("low", "high"), pl.Float64)
    schema = pl.Schema({name: numbers.get(name, pl.String) for name in PUBLISHED} | {"x": rows.schema["x"]})
    cast = float if rows.schema["x"].is_numeric() else str
    return pl.DataFrame([dict(mark) | {"x": cast(mark["x"])} for mark in marks], schema=schema)


def beside(rows: pl.DataFrame, chart: Chart, published: pl.DataFrame) -> pl.DataFrame:
    """Return `PLACE`, the chart's values with their published ranges, and passes and identity of each replay.

    A published number without a replay has its own row.
    """
    live = [chart.live] if chart.live in rows.columns else []
    along = [chart.x] if chart.x != "x" else []
    stacked = [chart.part] if chart.part else []
    parts = PARTS if "mass_changed" in (*along, *chart.values) else ()
    values = list(dict.fromkeys([*along, *parts, *chart.values, *stacked, *chart.drawn, *live]))
    numbers = rows.select([*PLACE, *values, "passes", "identity"])
    for value in published["value"].unique(maintain_order=True):
        ends = [pl.col(end).alias(f"{value} published, {end}") for end in ("low", "high")]
        once = [name for name in ("of", "source") if name not in numbers.columns]
        own = published.filter(pl.col("value") == value).select(*PLACE, *ends, *once)
        numbers = numbers.join(own, on=PLACE, how="full", coalesce=True, maintain_order="left_right", nulls_equal=True)
    return numbers


def with_published(numbers: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `beside` that have a published number."""
    lows = [pl.col(name).is_not_null() for name in numbers.columns if name.endswith(" published, low")]
    return numbers.filter(pl.any_horizontal(lows)) if lows else numbers.clear()


def write_csv(path: Path, table: pl.DataFrame) -> None:
    """Write every digit. Raises ResultError if the file cannot be written."""
    try:
        write_whole(path, (csv(table.to_dicts()) + "\n").encode())
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; choose another folder") from None


def printed(rows: pl.DataFrame, title: str) -> str:
    """Return the terminal table: short names, no empty columns, and shared settings in the title."""
    full = [name for name in rows.columns if rows[name].null_count() < len(rows)]
    kept = (
        rows.select(full).with_columns(pl.col("trace").str.head(DIGITS)).drop("identity", "of", "source", strict=False)
    )
    if kept["trace"].n_unique() == 1:
        title = f"{title}: {kept['model'][0]}, trace {kept['trace'][0]}"
        kept = kept.drop("model", "trace")
    if len(passes := kept["passes"].drop_nulls().unique()) == 1:
        title = f"{title}, passes {passes[0]}"
        kept = kept.drop("passes")
    texts = {name: kept[name].cast(pl.String) for name in ("panel", "x")}
    empty = [name for name, told in texts.items() if (told == "").all() or told.equals(kept["series"])]
    return table([_short(row) for row in kept.drop(empty).iter_rows(named=True)], title)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the ends of a published range into one cell."""
    short: dict[str, Any] = {}
    for name, value in row.items():
        stem, _, end = name.partition(" published, ")
        if end == "low":
            high = row[f"{stem} published, high"]
            heading = f"published {SHORT.get(stem, '')}".strip()
            ends = [] if value is None or high is None else [f"{end:.4g}" for end in dict.fromkeys((value, high))]
            short[heading] = " to ".join(ends)
        elif not end:
            short[HEADS.get(name, name).replace("_", " ")] = value
    return short
