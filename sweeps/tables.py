"""The tables of a sweep: what every column is called and how results become rows. No row names a host or a time.

configurations  one row per configuration: settings, totals, latencies; `error` says why there are no totals
layers          one row per configuration, layer and phase
requests        one row per configuration and request, if the experiment asks for them
bounds          one row per count that bounds hit rates; `configurations.bound` points here
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any, cast

import polars as pl

from results.columns import SETTINGS
from results.parts import SWEEP_VERSION
from results.result import Result, Row
from results.write import ABOUT, COUNTS, LIFETIME, TIMES
from simulator.bounds import Counted
from simulator.config import KINDS, SEMANTICS_VERSION
from sweeps.jobs import Job

#: One counter has the name of a setting.
RENAMED = {"capacity": "capacity_misses"}
COUNTERS = {RENAMED.get(name, name): kind for name, kind in COUNTS.items()}
KEY = {"rows_version": pl.Int64, "identity": pl.String}
FACTS = {field.name: field.dtype for field in ABOUT.fields if field.name not in ("identity", "policies")}
#: Every parameter of each policy, defaults included.
SPELLED_OUT = {f"{kind}_in_full": pl.String for kind in KINDS}
LATENCIES = {
    "requests": pl.Int64,
    "ttft_mean_ns": pl.Float64,  #: over the requests that have a prefill
    "ttft_median_ns": pl.Float64,
    "decode_ns": pl.Int64,  #: summed over requests; divided by decode_passes it is the TPOT
    "decode_passes": pl.Int64,
}
TABLES: dict[str, pl.Schema] = {
    "configurations": pl.Schema(
        KEY
        | {"bound": pl.String, "error": pl.String}
        | SETTINGS
        | FACTS
        | SPELLED_OUT
        | COUNTERS
        | {"time_ns": pl.Int64}
        | LIFETIME
        | LATENCIES
    ),
    "layers": pl.Schema(KEY | {"layer": pl.Int64, "phase": pl.String} | COUNTERS | LIFETIME),
    "requests": pl.Schema(KEY | {"request": pl.Int64} | TIMES | COUNTERS),
    "bounds": pl.Schema(KEY | dict.fromkeys(("belady_hits", "accesses", "compulsory"), pl.Int64)),
}
#: What orders a table, and tells its rows apart.
ORDER = {
    "configurations": ["identity"],
    "layers": ["identity", "layer", "phase"],
    "requests": ["identity", "request"],
    "bounds": ["identity"],
}
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
    full = {f"{kind}_in_full": text for kind, text in result.about["policies"].items()}
    own = {"bound": job.bound, "error": None}
    return _key(job) | own | result.config | about | full | _counters(result.totals) | _latencies(result.per_request)


def _each(job: Job, rows: Iterable[Row]) -> list[Row]:
    return [_key(job) | _counters(row) for row in rows]


def _counters(row: Mapping[str, Any]) -> Row:
    return {RENAMED.get(name, name): value for name, value in row.items()}


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
