"""Files of results that are one table: read whole, with digests checked, or refused by name in one line."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from pathlib import Path

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.schema import ROWS_VERSION, fields_of, is_damaged, row_digest
from moereplay.traces.documents import content

MOST_BYTES = 1 << 30  #: of one file of results


def read_rows(path: Path, verb: str) -> pl.DataFrame:
    """The rows of one file that `verb` wrote. Raises ResultError if it is broken, foreign or newer than this code."""
    part = read_parquet(path, verb)
    version = part["rows_version"].max() if part.schema.get("rows_version") == pl.Int64 else None
    if not isinstance(version, int):
        raise _foreign(path, "rows_version")
    if version > ROWS_VERSION:
        raise ResultError(f"{path} has rows_version {version}, newer than {ROWS_VERSION}; upgrade moereplay to read it")
    return part


def check_digests(path: Path, part: pl.DataFrame, verb: str) -> None:
    """Raises ResultError if a row is not what was written."""
    if any(row.get("digest") != row_digest(row) for row in part.iter_rows(named=True)):
        raise damaged(path, verb)


def read_parquet(path: Path, verb: str) -> pl.DataFrame:
    """A file that `verb` wrote, unparsed if damaged. Raises ResultError if it is, or no Parquet."""
    try:
        data = content(path, MOST_BYTES)
        if is_damaged(data):
            raise damaged(path, verb)
        return pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        raise ResultError(f"{path} is no readable Parquet file; delete it and {verb} again") from None


def check_columns(path: Path, schema: pl.Schema, columns: Mapping[str, Collection[str]]) -> None:
    """Raises ResultError naming the first field of a nested column that is missing."""
    for column, needed in columns.items():
        found = set(fields_of(schema.get(column)))
        if absent := [name for name in needed if name not in found]:
            raise _foreign(path, f"{column}.{absent[0]}")


def damaged(path: Path, verb: str) -> ResultError:
    """The refusal of a file that is not what was written."""
    return ResultError(f"{path} is damaged: its content does not match its digest; delete it and {verb} again")


def _foreign(path: Path, missing: str) -> ResultError:
    return ResultError(f"{path} holds no replay results ({missing} is missing); move it elsewhere")
