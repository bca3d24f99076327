"""A paper's figure as numbers: the rows with the published ones beside them, as CSV and for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.analysis.papers.rows import PLACE
from moereplay.analysis.tables import csv, table
from moereplay.results.chart import Chart
from moereplay.results.result import ResultError
from moereplay.traces.files import write_whole

#: Of published numbers: the column that they stand beside, a range, where in the figure, of what model and from where.
PUBLISHED = ("value", "low", "high", *PLACE, "of", "source")
#: Columns by their heads.
HEADS = {
    "collisions_per_miss": "coll/miss",
    "relative_collisions": "times",
    "ttft_mean_ms": "TTFT ms",
    "tokens_per_s": "tok/s",
    "relative_ttft_mean_ms": "TTFT / own",
}
#: Where a table has published numbers of two columns.
SHORT = {"ttft_mean_ms": "TTFT", "tokens_per_s": "tok/s"}
DIGITS = 8  #: of a trace that a reader compares


def published_frame(marks: Sequence[Mapping[str, Any]], rows: pl.DataFrame) -> pl.DataFrame:
    """Published numbers as a frame whose `x` is as that of the figure's rows."""
    numbers: dict[str, Any] = dict.fromkeys(("low", "high"), pl.Float64)
    schema = pl.Schema({name: numbers.get(name, pl.String) for name in PUBLISHED} | {"x": rows.schema["x"]})
    cast = float if rows.schema["x"].is_numeric() else str
    return pl.DataFrame([dict(mark) | {"x": cast(mark["x"])} for mark in marks], schema=schema)


def beside(rows: pl.DataFrame, chart: Chart, published: pl.DataFrame) -> pl.DataFrame:
    """`PLACE`, the chart's values, their published ranges, and the identity of each replay.

    What was published where nothing was replayed has a row of its own.
    """
    live = [chart.live] if chart.live in rows.columns else []
    along = [chart.x] if chart.x != "x" else []
    values = list(dict.fromkeys([*along, *chart.values, *chart.drawn, *live]))
    numbers = rows.select([*PLACE, *values, "identity"])
    for value in published["value"].unique(maintain_order=True):
        ends = [pl.col(end).alias(f"{value} published, {end}") for end in ("low", "high")]
        own = published.filter(pl.col("value") == value).select(*PLACE, *ends, *_once(numbers, "of", "source"))
        numbers = numbers.join(own, on=PLACE, how="full", coalesce=True, maintain_order="left_right", nulls_equal=True)
    return numbers


def _once(table: pl.DataFrame, *names: str) -> list[str]:
    """Those columns that a table does not have."""
    return [name for name in names if name not in table.columns]


def write_csv(path: Path, table: pl.DataFrame) -> None:
    """Every digit. Raises ResultError if it cannot be written."""
    try:
        write_whole(path, (csv(table.to_dicts()) + "\n").encode())
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; choose another folder") from None


def printed(rows: pl.DataFrame, title: str) -> str:
    """The table of a terminal: short names, no column that is empty, and what all rows share in the title."""
    full = [name for name in rows.columns if rows[name].null_count() < len(rows)]
    kept = (
        rows.select(full).with_columns(pl.col("trace").str.head(DIGITS)).drop("identity", "of", "source", strict=False)
    )
    if kept["trace"].n_unique() == 1:
        title = f"{title}: {kept['model'][0]}, trace {kept['trace'][0]}"
        kept = kept.drop("model", "trace")
    empty = [name for name in ("panel", "x") if _says_nothing(kept, name)]
    return table([_short(row) for row in kept.drop(empty).iter_rows(named=True)], title)


def _says_nothing(rows: pl.DataFrame, name: str) -> bool:
    """Whether a column is empty, or repeats the series."""
    texts = rows[name].cast(pl.String)
    return bool((texts == "").all()) or texts.equals(rows["series"])


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published range as one cell."""
    short: dict[str, Any] = {}
    for name, value in row.items():
        stem, _, end = name.partition(" published, ")
        if end == "low":
            high = row[f"{stem} published, high"]
            heading = f"published {SHORT.get(stem, '')}".strip()
            short[heading] = _range(value, high)
        elif not end:
            short[HEADS.get(name, name).replace("_", " ")] = value
    return short


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
