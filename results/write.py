"""Results in memory as a frame, and files of a single table: written whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.result import Event, Result
from moereplay.results.schema import FILE_DIGEST, NO_DIGEST, nested, with_file_digest
from moereplay.traces.scratch import write_whole
from moereplay.traces.texts import in_csv


def to_frame(results: Sequence[Result], bounds: Sequence[Mapping[str, int | None] | None]) -> pl.DataFrame:
    """One row per result, with a digest of its content; their configurations have the same settings."""
    return nested([result.to_json() for result in results], bounds, results[0].kinds)


def write_events(path: Path, events: Sequence[Event]) -> None:
    """The event log as Parquet, or as CSV if the name says so. Raises ResultError."""
    frame = pl.DataFrame([vars(event) for event in events], schema=_event_schema(), orient="row")
    write_frame(frame.rename({"step_pass": "pass"}), path)


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """A file, CSV if its name says so. Raises ResultError."""
    write_file(path, csv_text(frame).encode() if path.suffix == ".csv" else parquet(frame))


def csv_text(frame: pl.DataFrame) -> str:
    """Return the frame as CSV in which no spreadsheet takes a text for a formula; numbers stay numbers."""
    guarded = frame.with_columns(pl.col(pl.String).map_elements(in_csv, pl.String))
    return guarded.rename({name: in_csv(name) for name in frame.columns}).write_csv()


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
