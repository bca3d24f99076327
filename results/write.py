"""Results as Parquet: one row per configuration, nested as the JSON document is; written whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from results.columns import CONFIG
from results.errors import ResultError
from results.result import COUNTERS, FILE_DIGEST, NO_DIGEST, Event, Result, row_digest, with_file_digest
from results.settings import KINDS
from traces.scratch import write_whole

ROWS_VERSION = 1
ABOUT = pl.Struct(
    dict.fromkeys(("label", "identity", "trace", "model", "capacity_forms", "warning"), pl.String)
    | {"semantics": pl.Int64, "capacity_bytes": pl.Int64, "side_bytes": pl.Int64, "token_cycles": pl.Float64}
    | {"policies": pl.Struct(dict.fromkeys(KINDS, pl.String))}
)
COUNTS = dict.fromkeys(COUNTERS, pl.Int64)
LIFETIME = {"lifetime": pl.List(pl.Int64)}
TIMES = dict.fromkeys(("start_ns", "ttft_ns", "decode_ns", "decode_passes", "end_ns", "tokens"), pl.Int64)
#: What bounds the hits (`simulator/bounds.py`): null where Belady's are no bound; accesses; misses at any capacity.
BOUNDS = pl.Struct(dict.fromkeys(("belady_hits", "accesses", "compulsory"), pl.Int64))
SCHEMA = pl.Schema(
    {
        "rows_version": pl.Int64,
        "config": CONFIG,
        "about": ABOUT,
        "totals": pl.Struct(COUNTS | {"time_ns": pl.Int64} | LIFETIME),
        "bounds": BOUNDS,
        "per_layer": pl.List(pl.Struct({"layer": pl.Int64, "phase": pl.String} | COUNTS | LIFETIME)),
        "per_request": pl.List(pl.Struct({"request": pl.Int64} | TIMES | COUNTS)),
    }
)


def to_frame(results: Sequence[Result], bounds: Sequence[Mapping[str, int | None] | None]) -> pl.DataFrame:
    """One row per result, with a digest of its content."""
    rows = [
        result.to_json() | {"rows_version": ROWS_VERSION, "bounds": bound}
        for result, bound in zip(results, bounds, strict=True)
    ]
    frame = pl.DataFrame(rows, schema=SCHEMA)
    digests = [row_digest(row) for row in frame.iter_rows(named=True)]
    return frame.with_columns(pl.Series("digest", digests, pl.String))


def write_events(path: Path, events: Sequence[Event]) -> None:
    """The event log as Parquet, or as CSV if the name says so. Raises ResultError."""
    frame = pl.DataFrame([vars(event) for event in events], schema=_event_schema(), orient="row")
    write_frame(frame.rename({"step_pass": "pass"}), path)


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """A file, CSV if its name says so. Raises ResultError."""
    write_file(path, frame.write_csv().encode() if path.suffix == ".csv" else parquet(frame))


def write_file(path: Path, data: bytes) -> None:
    """A reader sees all of it or nothing. Raises ResultError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; nothing was written") from None


def parquet(frame: pl.DataFrame) -> bytes:
    """In memory first: polars calls a full disk by names of its own."""
    file = io.BytesIO()
    frame.write_parquet(file, metadata={FILE_DIGEST: NO_DIGEST})
    return with_file_digest(file.getvalue())


def _event_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    words = ("kind", "cause")
    return {name: pl.String if name in words else pl.Int64 for name in Event.__dataclass_fields__}
