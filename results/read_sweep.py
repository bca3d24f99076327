"""Results of a sweep, in the shape of `results.load`: one nested row per configuration, for metrics and figures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from results.columns import with_settings
from results.errors import ResultError
from results.parts import PARTS, PartError, StoredPart, stored_parts
from results.read import ABOUT_FIELDS, RENAMED, ROWS_VERSION
from results.result import ADDED, COUNTERS
from results.settings import KINDS

#: Columns that are no setting.
BESIDE = {"rows_version", "identity", "bound", "error", "warning", "label", "model", "trace", "semantics", "time_ns"}
LATENCIES = ("ttft_mean_ns", "ttft_median_ns", "decode_ns", "decode_passes")
BOUNDS = ("belady_hits", "accesses", "compulsory")


def is_sweep(folder: Path) -> bool:
    """Whether `sweep run` or `sweep merge` wrote the folder."""
    return any(part.is_dir() for part in folder.glob(PARTS))


def load(folder: Path) -> pl.DataFrame:
    """Every configuration that was replayed, once, by identity. Raises ResultError if there is none or one is broken.

    Beside the columns of `results.load` there is `latency`: what per-request rows would add up to, had they been kept.
    """
    table = _table(folder, "configurations").filter(pl.col("error").is_null())
    if table.is_empty():
        raise ResultError(f"no replayed configuration in {folder}; `moereplay sweep run FILE --out DIR` makes some")
    totals = [pl.col(_renamed(name)).alias(name) for name in COUNTERS]
    about = [pl.col(name) for name in (*ABOUT_FIELDS, "warning")]
    full = pl.struct(pl.col(f"{kind}_in_full").alias(kind) for kind in KINDS).alias("policies")
    nested = table.select(
        "identity",
        "bound",
        pl.lit(ROWS_VERSION, pl.Int64).alias("rows_version"),
        pl.struct(_settings(table)).alias("config"),
        pl.struct(*about, full).alias("about"),
        pl.struct(*totals, "time_ns", "lifetime").alias("totals"),
        pl.struct(LATENCIES).alias("latency"),
    )
    nested = _joined(nested, _bounds(folder), "bound")
    nested = _joined(nested, _lists(folder, "layers", "per_layer"), "identity")
    return _joined(nested, _lists(folder, "requests", "per_request"), "identity").drop("identity", "bound")


def errors(folder: Path) -> pl.DataFrame:
    """The configurations that have no result: identity, trace, settings and why."""
    table = _table(folder, "configurations")
    return table.filter(pl.col("error").is_not_null()).select("identity", "trace", *_settings(table), "error")


def _settings(table: pl.DataFrame) -> list[str]:
    """The columns that say what was asked for."""
    counted = {*map(_renamed, COUNTERS), *ABOUT_FIELDS, *LATENCIES, "side_bytes", "lifetime", "requests"}
    return [name for name in table.columns if name not in BESIDE | counted and not name.endswith("_in_full")]


def _bounds(folder: Path) -> pl.DataFrame:
    bounds = _table(folder, "bounds")
    return bounds.select(pl.col("identity").alias("bound"), pl.struct(BOUNDS).alias("bounds"))


def _lists(folder: Path, table: str, column: str) -> pl.DataFrame:
    """A row per configuration with its rows of another table as a list, in order."""
    rows = _table(folder, table).rename({new: old for old, new in RENAMED.items()})
    inner = [name for name in rows.columns if name not in ("rows_version", "identity")]
    grouped = rows.sort("identity", *inner[:2]).group_by("identity", maintain_order=True)
    return grouped.agg(pl.struct(inner).alias(column))


def _joined(left: pl.DataFrame, right: pl.DataFrame, on: str) -> pl.DataFrame:
    return left.join(right, on=on, how="left", maintain_order="left")


def _table(folder: Path, name: str) -> pl.DataFrame:
    """A table of all parts, each row once. Raises ResultError naming a damaged part, or one newer than this code."""
    found = [table for part in _parts(folder) if (table := _read(part, name)) is not None] or [_empty(name)]
    if any(table.schema != found[0].schema for table in found):
        raise ResultError(f"the parts of {folder} have {name} of other columns; keep versions apart")
    rows = pl.concat(found)
    order = [column for column in ("identity", "layer", "phase", "request") if column in rows.columns]
    if "error" in rows.columns:
        rows = rows.sort("identity", "error")  # a result stands above an error
    return rows.unique(order, keep="first", maintain_order=True).sort(order)


def _empty(name: str) -> pl.DataFrame:
    """A table that no part has."""
    counters = dict.fromkeys(map(_renamed, COUNTERS), pl.Int64)
    key = {"rows_version": pl.Int64, "identity": pl.String}
    times = dict.fromkeys(("start_ns", "ttft_ns", "decode_ns", "decode_passes", "end_ns", "tokens"), pl.Int64)
    columns: dict[str, dict[str, Any]] = {
        "configurations": {"error": pl.String},
        "bounds": dict.fromkeys(BOUNDS, pl.Int64),
        "layers": {"layer": pl.Int64, "phase": pl.String} | counters,
        "requests": {"request": pl.Int64} | times | counters,
    }
    return pl.DataFrame(schema=key | columns[name])


def _parts(folder: Path) -> Iterator[StoredPart]:
    try:
        yield from stored_parts(folder)
    except PartError as error:
        raise ResultError(str(error)) from None


def _read(part: StoredPart, name: str) -> pl.DataFrame | None:
    try:
        data = part.table(name)
        if data is None:
            return None
        table = _with_added(pl.read_parquet(io.BytesIO(data)))
        return with_settings(table) if name == "configurations" else table
    except PartError as error:
        raise ResultError(str(error)) from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        raise ResultError(f"{part.path}: its {name} are no Parquet table; remove it and sweep again") from None


def _with_added(table: pl.DataFrame) -> pl.DataFrame:
    """A table of any version with the counters of this one, null where they were not counted."""
    counters = [_renamed(name) for name in COUNTERS]
    found = table.columns
    if not set(counters) - set(ADDED) <= set(found):  # a table without counters
        return table
    null = [pl.lit(None, pl.Int64).alias(name) for name in ADDED if name not in found]
    first = found.index(counters[0])
    return table.with_columns(null).select(list(dict.fromkeys([*found[:first], *counters, *found])))


def _renamed(name: str) -> str:
    return RENAMED.get(name, name)
