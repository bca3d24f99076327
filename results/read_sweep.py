"""Results of a sweep, in the shape of `results.load`: one nested row per configuration, for metrics and figures."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import polars as pl

from results.columns import with_settings
from results.counters import COUNTERS
from results.errors import ResultError
from results.parts import PARTS, PartError, StoredPart, stored_parts
from results.read import ABOUT_FIELDS
from results.schema import (
    BOUNDS,
    IN_FULL,
    LATENCIES,
    ORDER,
    ROWS_VERSION,
    counters_in,
    settings_in,
    table_schemas,
    together,
)


def is_sweep(folder: Path) -> bool:
    """Whether `sweep run` or `sweep merge` wrote the folder."""
    return any(part.is_dir() for part in folder.glob(PARTS))


def load(folder: Path) -> pl.DataFrame:
    """Every configuration that was replayed, once, by identity. Raises ResultError if there is none or one is broken.

    Beside the columns of `results.load` there is `latency`: what per-request rows would add up to, had they been kept.
    """
    table = table_of(stored_parts(folder), "configurations").filter(pl.col("error").is_null())
    if table.is_empty():
        raise ResultError(f"no replayed configuration in {folder}; `moereplay sweep run FILE --out DIR` makes some")
    names = _names()
    totals = [pl.col(heading).alias(names.get(heading, heading)) for heading in counters_in(table.columns)]
    full = [pl.col(name).alias(name.removesuffix(IN_FULL)) for name in table.columns if name.endswith(IN_FULL)]
    nested = table.select(
        "identity",
        "bound",
        pl.lit(ROWS_VERSION, pl.Int64).alias("rows_version"),
        pl.struct(settings_in(table.columns)).alias("config"),
        pl.struct(*ABOUT_FIELDS, "warning", "seconds", "calibration", pl.struct(full).alias("policies")).alias("about"),
        pl.struct(*totals, "time_ns", "lifetime").alias("totals"),
        pl.struct([name for name in LATENCIES if name != "requests"]).alias("latency"),
    )
    nested = _joined(nested, _bounds(folder), "bound")
    nested = _joined(nested, _lists(folder, "layers", "per_layer"), "identity")
    return _joined(nested, _lists(folder, "requests", "per_request"), "identity").drop("identity", "bound")


def errors(folder: Path) -> pl.DataFrame:
    """The configurations that have no result: identity, trace, settings and why."""
    table = table_of(stored_parts(folder), "configurations")
    failed = table.filter(pl.col("error").is_not_null())
    return failed.select("identity", "trace", *settings_in(table.columns), "error")


def table_of(parts: Iterable[StoredPart], name: str) -> pl.DataFrame:
    """A table of parts of any versions, in order, each row once; no rows where no part has the table.

    Of a row that several parts have, the one with the fewest nulls stays: a result rather than an error, what a newer
    version counted rather than what an older one did not. Raises ResultError naming a part that is damaged or foreign.
    """
    read = [(part.path, table) for part in parts if (table := _read(part, name)) is not None]
    rows = together(table_schemas()[name], read)
    nulls = pl.sum_horizontal(pl.all().is_null()).alias("nulls")
    spelled = [setting for setting in ("platform", "capacity") if setting in rows.columns]
    best_first = rows.with_columns(nulls).sort(*ORDER[name], "nulls", *spelled).drop("nulls")
    return best_first.unique(ORDER[name], keep="first", maintain_order=True)


def _read(part: StoredPart, name: str) -> pl.DataFrame | None:
    data = part.table(name)
    if data is None:
        return None
    try:
        table = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        raise PartError(f"{part.path}: its {name} are no Parquet table; remove it and run the sweep again") from None
    if lacking := [key for key in ORDER[name] if key not in table.columns]:
        raise PartError(f"{part.path}: its {name} lack the column {lacking[0]}; remove it and run the sweep again")
    return with_settings(table) if name == "configurations" else table


def _bounds(folder: Path) -> pl.DataFrame:
    return table_of(stored_parts(folder), "bounds").select(
        pl.col("identity").alias("bound"), pl.struct(list(BOUNDS)).alias("bounds")
    )


def _lists(folder: Path, table: str, column: str) -> pl.DataFrame:
    """A row per configuration with its rows of another table as a list, in order."""
    rows = table_of(stored_parts(folder), table).rename(_names(), strict=False)
    inner = [name for name in rows.columns if name not in ("rows_version", "identity")]
    grouped = rows.group_by("identity", maintain_order=True)
    return grouped.agg(pl.struct(inner).alias(column))


def _names() -> dict[str, str]:
    """Counters by their column."""
    return {counter.heading: counter.name for counter in COUNTERS.values()}


def _joined(left: pl.DataFrame, right: pl.DataFrame, on: str) -> pl.DataFrame:
    return left.join(right, on=on, how="left", maintain_order="left")
