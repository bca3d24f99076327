"""Parts of any number of runs become one part: each row once, sorted, the same bytes whatever the way of running."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from moereplay.results.parts import SWEEP_VERSION, TABLES, Part
from moereplay.results.stored import sources, table_of
from moereplay.results.tables import frame_bytes
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.store import Place
from moereplay.traces.documents import json_text


class Merged(NamedTuple):
    """Where a merge was written, and how much."""

    where: str
    configurations: int
    errors: int


def merge(places: Sequence[Place], out: Place) -> Merged:
    """Write all parts of `places` as the one part of `out`.

    Raises ConfigError if `out` is not new, ResultError if a part is damaged.
    """
    if out.names():
        raise ConfigError(f"{out} holds results already; merge into a new folder")
    found = [part for place in places for part in sources(place.local())]
    if not found:
        where = ", ".join(map(str, places))
        raise ConfigError(f"no parts in {where}; make some with: moereplay sweep run FILE --out DIR")
    tables = {name: table_of(found, name) for name in TABLES}
    part = Part({name: frame_bytes(table) for name, table in tables.items() if len(table)}, _holds(tables))
    out.store(part, _provenance(each.provenance for each in found))
    errors = tables["configurations"]["error"].count()
    return Merged(f"{out}/{part.name}", len(tables["configurations"]) - errors, errors)


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
    texts = sorted({json_text(each, sort_keys=True) for each in own})
    return {"sweep_version": SWEEP_VERSION, "merged": [json.loads(text) for text in texts]}
