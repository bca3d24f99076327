"""Files of `replay --out` until November 2026, one nested row each, read as the tables of a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.results.counters import heading_of
from moereplay.results.files import check_columns, check_digests, read_rows
from moereplay.results.parts import PROVENANCE, SWEEP_VERSION, PartError, older_files
from moereplay.results.read import ABOUT_FIELDS
from moereplay.results.schema import BOUNDS, FACTS, IN_FULL, LATENCIES, fields_of, with_config
from moereplay.results.tables import latencies
from moereplay.traces.documents import DocumentError, content, from_json

MOST_BYTES = 1 << 20  #: of a provenance
#: What every file must hold: nested column -> the fields that are read by name. A counter may be missing.
NEEDED: dict[str, tuple[str, ...]] = {
    "config": ("eviction", "prefetch", "miss", "routing", "capacity", "platform", "contract", "scope", "passes"),
    "about": (*ABOUT_FIELDS, "policies"),
    "totals": ("time_ns",),
    "bounds": ("belady_hits", "accesses", "compulsory"),
    "per_layer": ("layer", "phase"),
    "per_request": ("request", "ttft_ns", "decode_ns", "decode_passes"),
}


@dataclass(frozen=True)
class OlderFile:
    """A file of one configuration."""

    path: Path

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The provenance file of the same name; empty if an earlier version wrote none."""
        path = self.path.with_suffix(f".{PROVENANCE}")
        try:
            return dict(from_json(content(path, MOST_BYTES))) if path.exists() else {}
        except (DocumentError, ValueError, TypeError, OSError, RecursionError):
            raise PartError(f"{path} is damaged; remove it, or {self.path} too and replay again") from None

    def frame(self, name: str) -> pl.DataFrame | None:
        """Return a table of its rows. Raises ResultError if the file is broken, foreign, or newer than this code."""
        return self._tables[name]

    @cached_property
    def _tables(self) -> dict[str, pl.DataFrame]:
        rows = read_rows(self.path, "replay")
        check_columns(self.path, rows.schema, NEEDED)
        check_digests(self.path, rows, "replay")
        rows = with_config(rows).select(pl.col("about").struct.field("identity"), pl.all())
        return {
            "configurations": _configurations(rows),
            "layers": _each(rows, "per_layer"),
            "requests": _each(rows, "per_request"),
            "bounds": _bounds(rows),
        }


def stored_files(folder: Path) -> Iterator[OlderFile]:
    """Yield the files of a folder, sorted by name."""
    return (OlderFile(path) for path in sorted(older_files(folder)) if path.suffix == ".parquet")


_VERSION = pl.lit(SWEEP_VERSION, pl.Int64).alias("rows_version")


def _configurations(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the table of configurations. The bound gets the same identity, as the file does not record its own."""
    config, about, totals = (pl.col(name).struct for name in ("config", "about", "totals"))
    said = dict(rows.select("about").unnest("about").schema)
    policies = fields_of(said["policies"])
    bound = pl.when(pl.col("bounds").is_not_null()).then(pl.col("identity")).alias("bound")
    counters = [name for name in fields_of(rows.schema["totals"]) if name not in ("time_ns", "lifetime")]
    return rows.select(
        *(_VERSION, "identity", bound, pl.lit(None, pl.String).alias("error")),
        *map(config.field, fields_of(rows.schema["config"])),
        *(about.field(name) for name in FACTS if name in said),
        *(about.field("policies").struct.field(kind).alias(f"{kind}{IN_FULL}") for kind in policies),
        *(totals.field(name).alias(heading_of(name)) for name in (*counters, "time_ns", "lifetime")),
        *_latencies(rows),
    )


def _latencies(rows: pl.DataFrame) -> list[pl.Series]:
    found = [
        latencies([{"decode_tokens": row["decode_passes"], **row} for row in requests])  # a token per pass then
        for requests in rows["per_request"].to_list()
    ]
    return pl.DataFrame(found, schema=LATENCIES).get_columns()


def _each(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    renamed = pl.col(column).struct.rename_fields(list(map(heading_of, fields_of(rows.schema[column]))))
    listed = rows.select(_VERSION, "identity", column).explode(column, empty_as_null=False)
    return listed.with_columns(renamed).unnest(column)


def _bounds(rows: pl.DataFrame) -> pl.DataFrame:
    known, names = rows.filter(pl.col("bounds").is_not_null()), fields_of(rows.schema["bounds"])
    return known.select(
        _VERSION, "identity", *(pl.col("bounds").struct.field(name) for name in BOUNDS if name in names)
    )
