"""Stored results, of `replay --out` or a sweep, as a frame for metrics and figures: a nested row per configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.older import stored_files
from moereplay.results.parts import stored_parts
from moereplay.results.remarks import SYNTHETIC
from moereplay.results.schema import (
    BOUNDS,
    FACTS,
    IN_FULL,
    LATENCIES,
    ORDER,
    ROWS_VERSION,
    counters_in,
    settings_in,
    table_schemas,
    together,
    with_tokens,
)
from moereplay.traces.synthetic import MODEL


class Source(Protocol):
    """The source of tables: a part, or a file of an earlier version."""

    @property
    def path(self) -> Path:
        """Path of the folder or file."""
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of the source."""
        ...

    def frame(self, name: str) -> pl.DataFrame | None:
        """Return a table, None if the source has none. Raises ResultError if it is damaged."""
        ...


def sources(folder: Path) -> list[Source]:
    """List the sources in a folder. Raises ResultError for the first broken one."""
    return [*stored_parts(folder), *stored_files(folder)]


def load(folder: Path) -> pl.DataFrame:
    """Load every replayed configuration once, sorted by identity. Raises ResultError if one is broken or there is none.

    `latency` is what per-request rows add up to, or would, had a sweep kept them.
    """
    found = sources(folder)
    table = table_of(found, "configurations").filter(pl.col("error").is_null())
    if table.is_empty():
        raise ResultError(f"no results in {folder}; make some with: moereplay replay TRACE --out {folder}")
    table = _with_routing(table)
    names = _names()
    totals = [pl.col(heading).alias(names.get(heading, heading)) for heading in counters_in(table.columns)]
    full = [pl.col(name).alias(name.removesuffix(IN_FULL)) for name in table.columns if name.endswith(IN_FULL)]
    nested = table.select(
        "identity",
        "bound",
        pl.lit(ROWS_VERSION, pl.Int64).alias("rows_version"),
        pl.struct(settings_in(table.columns)).alias("config"),
        pl.struct("identity", *FACTS, pl.struct(full).alias("policies")).alias("about"),
        pl.struct(*totals, "time_ns", "lifetime").alias("totals"),
        pl.struct([name for name in LATENCIES if name != "requests"]).alias("latency"),
    )
    nested = _joined(nested, _bounds(found), "bound")
    nested = _joined(nested, _lists(found, "layers", "per_layer"), "identity")
    return _joined(nested, _lists(found, "requests", "per_request"), "identity").drop("identity", "bound")


def _with_routing(table: pl.DataFrame) -> pl.DataFrame:
    """Add the synthetic routing that earlier versions stated only in the model's name."""
    named = pl.col("model").str.strip_prefix(MODEL).alias("synthetic")
    labelled = pl.col("label") + f", {SYNTHETIC}"
    older = pl.col("synthetic").is_null() & pl.col("model").str.starts_with(MODEL)
    return table.with_columns(
        pl.when(older).then(labelled).otherwise("label").alias("label"),
        pl.when(older).then(named).otherwise("synthetic"),
    )


def errors(folder: Path) -> pl.DataFrame:
    """Return the configurations that have no result: identity, trace, settings and why."""
    table = table_of(sources(folder), "configurations")
    failed = table.filter(pl.col("error").is_not_null())
    return failed.select("identity", "trace", *settings_in(table.columns), "error")


def table_of(found: Iterable[Source], name: str) -> pl.DataFrame:
    """Return one table of all sources, of any versions, in order, without duplicate rows; empty if no part has it.

    Of duplicates, the row with the fewest nulls is kept: a result rather than an error, the counters of a newer
    version rather than the nulls of an older one. Raises ResultError naming a damaged or foreign source.
    """
    read = [(each.path, table) for each in found if (table := each.frame(name)) is not None]
    rows = with_tokens(together(table_schemas()[name], read))
    nulls = pl.sum_horizontal(pl.all().is_null()).alias("nulls")
    spelled = [setting for setting in ("platform", "capacity") if setting in rows.columns]
    best_first = rows.with_columns(nulls).sort(*ORDER[name], "nulls", *spelled).drop("nulls")
    return best_first.unique(ORDER[name], keep="first", maintain_order=True)


def _bounds(found: Sequence[Source]) -> pl.DataFrame:
    return table_of(found, "bounds").select(pl.col("identity").alias("bound"), pl.struct(list(BOUNDS)).alias("bounds"))


def _lists(found: Sequence[Source], table: str, column: str) -> pl.DataFrame:
    """Return a row per configuration with its rows of another table as a list, in order."""
    rows = table_of(found, table).rename(_names(), strict=False)
    inner = [name for name in rows.columns if name not in ("rows_version", "identity")]
    grouped = rows.group_by("identity", maintain_order=True)
    return grouped.agg(pl.struct(inner).alias(column))


def _names() -> dict[str, str]:
    """Return counters by their column."""
    return {counter.heading: counter.name for counter in COUNTERS.values()}


def _joined(left: pl.DataFrame, right: pl.DataFrame, on: str) -> pl.DataFrame:
    return left.join(right, on=on, how="left", maintain_order="left")
