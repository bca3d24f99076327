"""How results become rows of a sweep's tables. No row names a host or a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any, cast

import polars as pl

from results.counters import heading_of
from results.parts import SWEEP_VERSION
from results.result import Result, Row
from results.schema import FACTS, IN_FULL, table_schemas
from results.settings import setting_kinds
from simulator.bounds import Counted
from simulator.config import KINDS, SEMANTICS_VERSION
from sweeps.jobs import Job

TABLES = table_schemas(setting_kinds(), KINDS)
ROWS_PER_GROUP = 1 << 16  #: fixed, so that equal tables are equal bytes

Rows = dict[str, list[Row]]


def rows_of(job: Job, result: Result | Counted | None, error: str | None, requests: bool) -> Rows:
    """The rows that one job adds to each table."""
    if job.kind == "bound":
        return {"bounds": [] if result is None else [_key(job) | dict(cast(Counted, result))]}
    if not isinstance(result, Result):
        return {"configurations": [_key(job) | {"bound": job.bound, "error": error} | _asked(job)]}
    rows = {"configurations": [_configuration(job, result)], "layers": _each(job, result.per_layer)}
    return rows | ({"requests": _each(job, result.per_request)} if requests else {})


def to_parquet(name: str, rows: Iterable[Row]) -> bytes:
    """Rows of a table as a Parquet file."""
    return frame_bytes(pl.DataFrame(list(rows), schema=TABLES[name]))


def frame_bytes(frame: pl.DataFrame) -> bytes:
    """A table as a Parquet file; equal tables give equal bytes."""
    file = io.BytesIO()
    frame.rechunk().write_parquet(file, compression="zstd", row_group_size=ROWS_PER_GROUP)
    return file.getvalue()


def _key(job: Job) -> Row:
    return {"rows_version": SWEEP_VERSION, "identity": job.identity}


def _asked(job: Job) -> Row:
    """What is known of a configuration that could not be replayed."""
    return job.config.model_dump(mode="json") | {"trace": job.digest, "semantics": SEMANTICS_VERSION}


def _configuration(job: Job, result: Result) -> Row:
    about = {name: value for name, value in result.about.items() if name in FACTS}
    full = {f"{kind}{IN_FULL}": text for kind, text in result.about["policies"].items()}
    own = {"bound": job.bound, "error": None}
    return _key(job) | own | result.config | about | full | _counters(result.totals) | _latencies(result.per_request)


def _each(job: Job, rows: Iterable[Row]) -> list[Row]:
    return [_key(job) | _counters(row) for row in rows]


def _counters(row: Mapping[str, Any]) -> Row:
    return {heading_of(name): value for name, value in row.items()}


def _latencies(requests: Iterable[Row]) -> Row:
    requests = list(requests)
    first = [row["ttft_ns"] for row in requests if row["ttft_ns"] is not None]
    return {
        "requests": len(requests),
        "ttft_mean_ns": float(mean(first)) if first else None,
        "ttft_median_ns": float(median(first)) if first else None,
        "decode_ns": sum(row["decode_ns"] or 0 for row in requests),
        "decode_passes": sum(row["decode_passes"] or 0 for row in requests),
    }
