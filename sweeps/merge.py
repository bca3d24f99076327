"""Parts of any number of runs become one part: each row once, sorted, the same bytes whatever the way of running."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from results.columns import with_settings
from results.parts import SWEEP_VERSION, Part, PartError, StoredPart
from results.result import ADDED
from simulator.errors import ConfigError
from sweeps.folder_store import Folder
from sweeps.store import Place
from sweeps.tables import ORDER, TABLES, frame_bytes


class Merged(NamedTuple):
    """What was written."""

    where: str
    configurations: int
    errors: int


def merge(places: Sequence[Place], out: Place) -> Merged:
    """Write all parts of `places` as the one part of `out`. Raises ConfigError if one is damaged, or `out` not new."""
    if out.names():
        raise ConfigError(f"{out} holds results already; merge into a new folder")
    found = [part for place in places for part in Folder(place.local()).parts()]
    if not found:
        where = ", ".join(map(str, places))
        raise ConfigError(f"no parts in {where}; make some with: moereplay sweep run FILE --out DIR")
    tables = {name: _table(name, found) for name in TABLES}
    part = Part({name: frame_bytes(table) for name, table in tables.items() if len(table)}, _holds(tables))
    out.store(part, _provenance(each.provenance for each in found))
    errors = tables["configurations"]["error"].count()
    return Merged(f"{out}/{part.name}", len(tables["configurations"]) - errors, errors)


def read_table(part: StoredPart, name: str) -> pl.DataFrame | None:
    """A table of a part, None if it has none. Raises PartError if it is damaged or of another version."""
    data = part.table(name)
    if data is None:
        return None
    try:
        table = pl.read_parquet(io.BytesIO(data))
        table = with_settings(table) if name == "configurations" else table
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        raise PartError(f"{part.path}: its {name} are no Parquet table; remove it and run the sweep again") from None
    lacking = [column for column in ADDED if column in TABLES[name] and column not in table.columns]
    if {*table.columns, *lacking} == set(TABLES[name]):
        null = pl.lit(None, pl.Int64)
        table = table.with_columns(null.alias(column) for column in lacking).select(TABLES[name].names())
    if table.schema != TABLES[name]:
        raise PartError(f"{part.path}: its {name} have other columns than version {SWEEP_VERSION}; keep versions apart")
    return table


def _table(name: str, found: Iterable[StoredPart]) -> pl.DataFrame:
    """All rows of a table, in order. A result stands above an error; of equals one stays."""
    read = [read_table(part, name) for part in found]
    table = pl.concat([pl.DataFrame(schema=TABLES[name]), *(rows for rows in read if rows is not None)])
    if name == "configurations":
        table = table.sort("identity", "error", "platform", "capacity", nulls_last=False)
    return table.unique(ORDER[name], keep="first", maintain_order=True).sort(ORDER[name])


def _holds(tables: dict[str, pl.DataFrame]) -> dict[str, list[str]]:
    made = tables["configurations"]
    holds = {
        "configuration": made.filter(pl.col("error").is_null())["identity"].to_list(),
        "error": made.filter(pl.col("error").is_not_null())["identity"].to_list(),
        "bound": tables["bounds"]["identity"].to_list(),
        "requests": tables["requests"]["identity"].unique().sort().to_list(),
    }
    return {what: identities for what, identities in holds.items() if identities}


def _provenance(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Each distinct provenance of the parts once."""
    of_the_part = ("holds", "sha256", "digest")
    own = [{name: value for name, value in each.items() if name not in of_the_part} for each in sources]
    texts = sorted({json.dumps(each, sort_keys=True) for each in own})
    return {"sweep_version": SWEEP_VERSION, "merged": [json.loads(text) for text in texts]}
