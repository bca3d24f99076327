"""Files of results that are one table: read whole, with digests checked, or refused by name in one line."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.parts import MOST_BYTES
from moereplay.results.result import Event, Result
from moereplay.results.schema import (
    FILE_DIGEST,
    NO_DIGEST,
    ROWS_VERSION,
    fields_of,
    is_damaged,
    nested,
    row_digest,
    with_file_digest,
)
from moereplay.traces.documents import content
from moereplay.traces.files import write_whole
from moereplay.traces.texts import in_csv


def read_rows(path: Path, verb: str) -> pl.DataFrame:
    """Return the rows of one file written by `verb`.

    Raises ResultError if it is broken, foreign or newer than this code.
    """
    part = read_parquet(path, verb)
    version = part["rows_version"].max() if part.schema.get("rows_version") == pl.Int64 else None
    if not isinstance(version, int):
        raise _foreign(path, "rows_version")
    if version > ROWS_VERSION:
        raise ResultError(f"{path} has rows_version {version}, newer than {ROWS_VERSION}; upgrade moereplay to read it")
    return part


def check_digests(path: Path, part: pl.DataFrame, verb: str) -> None:
    """Raise ResultError if a row differs from the written one."""
    if any(row.get("digest") != row_digest(row) for row in part.iter_rows(named=True)):
        raise damaged(path, verb)


def read_parquet(path: Path, verb: str) -> pl.DataFrame:
    """Read a Parquet file written by `verb`. Raises ResultError, before parsing, for a damaged or different file."""
    try:
        data = content(path, MOST_BYTES)
        if is_damaged(data):
            raise damaged(path, verb)
        return pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        raise ResultError(f"cannot read {path} as Parquet; delete it and {verb} again") from None


def check_columns(path: Path, schema: pl.Schema, columns: Mapping[str, Collection[str]]) -> None:
    """Raises ResultError naming the first field of a nested column that is missing."""
    for column, needed in columns.items():
        found = set(fields_of(schema.get(column)))
        if absent := [name for name in needed if name not in found]:
            raise _foreign(path, f"{column}.{absent[0]}")


def damaged(path: Path, verb: str) -> ResultError:
    """Return the error for a damaged file."""
    return ResultError(f"{path} is damaged: its content does not match its digest; delete it and {verb} again")


def _foreign(path: Path, missing: str) -> ResultError:
    return ResultError(f"{path} holds no replay results ({missing} is missing); move it elsewhere")


# -- Results in memory as a frame, and files of a single table: written whole or not at all.


def to_frame(results: Sequence[Result], bounds: Sequence[Mapping[str, int | None] | None]) -> pl.DataFrame:
    """Return one row per result, with a digest of its content. All configurations must have the same settings."""
    return nested([result.to_json() for result in results], bounds, results[0].kinds)


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write the event log as Parquet, or as CSV if the name ends in .csv. Raises ResultError."""
    words = ("kind", "cause")
    frame = pl.DataFrame(
        [vars(event) for event in events],
        schema={name: pl.String if name in words else pl.Int64 for name in Event.__dataclass_fields__},
        orient="row",
    )
    write_frame(frame.rename({"step_pass": "pass"}), path)


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """Write a frame as Parquet, or as CSV if the name ends in .csv. Raises ResultError."""
    write_file(path, csv_text(frame).encode() if path.suffix == ".csv" else parquet(frame))


def csv_text(frame: pl.DataFrame) -> str:
    """Return the frame as CSV in which no spreadsheet takes a text for a formula; numbers stay numbers."""
    guarded = frame.with_columns(pl.col(pl.String).map_elements(in_csv, pl.String))
    return guarded.rename({name: in_csv(name) for name in frame.columns}).write_csv()


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see either the complete file or none. Raises ResultError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; nothing was written") from None


def parquet(frame: pl.DataFrame) -> bytes:
    """Return the frame as Parquet bytes, in memory, because polars reports a full disk with other errors."""
    file = io.BytesIO()
    frame.write_parquet(file, metadata={FILE_DIGEST: NO_DIGEST})
    return with_file_digest(file.getvalue())
