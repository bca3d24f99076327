"""Rows of a part's tables, made from results. No row contains a host name or a time of day."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import polars as pl

from moereplay.results.counters import heading_of
from moereplay.results.metrics import prefill_times, request_times
from moereplay.results.parts import SWEEP_VERSION, Part
from moereplay.results.result import Result, Row
from moereplay.results.schema import FACTS, IN_FULL, table_schemas

ROWS_PER_GROUP = 1 << 16  #: fixed, so that equal tables are equal bytes

Rows = dict[str, list[Row]]


def key(identity: str) -> Row:
    """Return the columns that every table has."""
    return {"rows_version": SWEEP_VERSION, "identity": identity}


def rows_of(result: Result, bound: str | None, requests: bool = True) -> Rows:
    """Return the rows that one result adds to each table; `bound` is the identity of the count that bounds it."""
    identity = result.about["identity"]
    rows = {"configurations": [_configuration(result, bound)], "layers": _each(identity, result.per_layer)}
    return rows | ({"requests": _each(identity, result.per_request)} if requests else {})


def part_of(result: Result, bound: str | None, counted: Mapping[str, int | None] | None) -> Part:
    """Make a part of one result and the bounds of its hits."""
    rows, holds = rows_of(result, bound), {name: [result.about["identity"]] for name in ("configuration", "requests")}
    if bound is not None and counted is not None:
        rows["bounds"], holds["bound"] = [key(bound) | dict(counted)], [bound]
    schemas = table_schemas(result.kinds, result.about["policies"])
    return Part({name: to_parquet(table, schemas[name]) for name, table in rows.items() if table}, holds)


def to_parquet(rows: Iterable[Row], schema: pl.Schema) -> bytes:
    """Return the rows of a table as Parquet bytes."""
    return frame_bytes(pl.DataFrame(list(rows), schema=schema))


def frame_bytes(frame: pl.DataFrame) -> bytes:
    """Return a table as a Parquet file; equal tables give equal bytes."""
    file = io.BytesIO()
    frame.rechunk().write_parquet(file, compression="zstd", row_group_size=ROWS_PER_GROUP)
    return file.getvalue()


def latencies(requests: Sequence[Mapping[str, Any]]) -> Row:
    """Sum the rows of requests: the columns of `LATENCIES`."""
    first, times = prefill_times(requests), request_times(requests)
    return {
        "requests": len(requests),
        "ttft_mean_ns": float(mean(first)) if first else None,
        "ttft_median_ns": float(median(first)) if first else None,
        "decode_ns": times["decode_ns"],
        "decode_passes": sum(row["decode_passes"] or 0 for row in requests),
        "decode_tokens": times["decode_tokens"],
    }


def _configuration(result: Result, bound: str | None) -> Row:
    about = {name: value for name, value in result.about.items() if name in FACTS}
    full = {f"{kind}{IN_FULL}": text for kind, text in result.about["policies"].items()}
    own = key(result.about["identity"]) | {"bound": bound, "error": None}
    return own | result.config | about | full | _counters(result.totals) | latencies(result.per_request)


def _each(identity: str, rows: Iterable[Row]) -> list[Row]:
    return [key(identity) | _counters(row) for row in rows]


def _counters(row: Mapping[str, Any]) -> Row:
    return {heading_of(name): value for name, value in row.items()}
