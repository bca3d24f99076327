"""What a job of a sweep adds to the tables of its part: the rows of a result, of a count, or of an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moereplay.results import tables
from moereplay.results.result import Result, Row
from moereplay.results.schema import table_schemas
from moereplay.results.settings import setting_kinds
from moereplay.results.tables import Rows, key
from moereplay.simulator.bounds import Counted
from moereplay.simulator.config import KINDS, SEMANTICS_VERSION
from moereplay.sweeps.jobs import Job

TABLES = table_schemas(setting_kinds(), KINDS)


def rows_of(job: Job, result: Result | Counted | None, error: str | None, requests: bool) -> Rows:
    """The rows that one job adds to each table."""
    if job.kind == "bound":
        return {"bounds": [] if result is None else [key(job.identity) | dict(cast(Counted, result))]}
    if not isinstance(result, Result):
        return {"configurations": [key(job.identity) | {"bound": job.bound, "error": error} | _asked(job)]}
    return tables.rows_of(result, job.bound, requests)


def to_parquet(name: str, rows: Iterable[Row]) -> bytes:
    """Rows of a table as a Parquet file."""
    return tables.to_parquet(rows, TABLES[name])


def _asked(job: Job) -> Row:
    """What is known of a configuration that could not be replayed."""
    return job.config.model_dump(mode="json") | {"trace": job.digest, "semantics": SEMANTICS_VERSION}
