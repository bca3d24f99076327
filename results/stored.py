"""Stored results, of `replay --out` or a sweep, as a frame for metrics and figures: a nested row per configuration.

The files that `replay --out` wrote until November 2026 have one nested row each; they are read as the tables of a part.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from moereplay.results.counters import COUNTERS, DECODE, IDLE, PHASE, REQUEST_TIMES, SPENT, heading_of
from moereplay.results.errors import ResultError
from moereplay.results.files import check_columns, check_digests, read_rows
from moereplay.results.parts import PROVENANCE, SWEEP_VERSION, PartError, latencies, older_files, stored_parts
from moereplay.results.read import ABOUT_FIELDS, filtered
from moereplay.results.remarks import SYNTHETIC
from moereplay.results.schema import (
    BOUNDS,
    FACTS,
    IN_FULL,
    LATENCIES,
    ORDER,
    ROWS_VERSION,
    counters_in,
    fields_of,
    schema_of,
    settings_in,
    table_schemas,
    together,
    with_config,
    with_tokens,
)
from moereplay.traces.documents import DocumentError, content, from_json
from moereplay.traces.summary import SYNTHETIC_MODEL
from moereplay.traces.texts import typed

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

    def frame(self, name: str, columns: Collection[str] = ()) -> pl.DataFrame | None:
        """Return a table of its rows, or some columns of it; None if it has none.

        Raises ResultError if the file is broken, foreign, or newer than this code.
        """
        table = self._tables.get(name)
        if table is None or not columns:
            return table
        return table.select(each for each in table.columns if each in columns)

    @cached_property
    def _tables(self) -> dict[str, pl.DataFrame]:
        rows = read_rows(self.path, "replay")
        check_columns(self.path, rows.schema, NEEDED)
        check_digests(self.path, rows, "replay")
        rows = with_config(rows).select(pl.col("about").struct.field("identity"), pl.all())
        return {
            "configurations": _older_configurations(rows),
            "layers": _older_rows(rows, "per_layer"),
            "requests": _older_rows(rows, "per_request"),
            "bounds": _older_bounds(rows),
        }


def stored_files(folder: Path) -> Iterator[OlderFile]:
    """Yield the files of a folder, sorted by name."""
    return (OlderFile(path) for path in sorted(older_files(folder)) if path.suffix == ".parquet")


_VERSION = pl.lit(SWEEP_VERSION, pl.Int64).alias("rows_version")


def _older_configurations(rows: pl.DataFrame) -> pl.DataFrame:
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
        *_older_latencies(rows),
    )


def _older_latencies(rows: pl.DataFrame) -> list[pl.Series]:
    found = [
        latencies([{"decode_tokens": row["decode_passes"], **row} for row in requests])  # a token per pass then
        for requests in rows["per_request"].to_list()
    ]
    return pl.DataFrame(found, schema=LATENCIES).get_columns()


def _older_rows(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    renamed = pl.col(column).struct.rename_fields(list(map(heading_of, fields_of(rows.schema[column]))))
    listed = rows.select(_VERSION, "identity", column).explode(column, empty_as_null=False)
    return listed.with_columns(renamed).unnest(column)


def _older_bounds(rows: pl.DataFrame) -> pl.DataFrame:
    known, names = rows.filter(pl.col("bounds").is_not_null()), fields_of(rows.schema["bounds"])
    return known.select(
        _VERSION, "identity", *(pl.col("bounds").struct.field(name) for name in BOUNDS if name in names)
    )


class Source(Protocol):
    """The source of tables: a part, or a file of an earlier version."""

    @property
    def path(self) -> Path:
        """Path of the folder or file."""
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of the source."""
        ...

    def frame(self, name: str, columns: Collection[str] = ()) -> pl.DataFrame | None:
        """Return a table, or some columns of it; None if the source has none. Raises ResultError if it is damaged."""
        ...


def sources(folder: Path) -> list[Source]:
    """List the sources in a folder. Raises ResultError for the first broken one."""
    return [*stored_parts(folder), *stored_files(folder)]


#: Tables of rows of configurations, and the columns that hold them as lists.
LISTS = {"layers": "per_layer", "requests": "per_request", "request_layers": "per_request_layer"}
EVERYTHING: Mapping[str, Collection[str]] = dict.fromkeys(LISTS, ())
_COUNTED = ("accesses", "misses", "collisions")
#: Columns that figures, rankings and comparisons read of the rows of configurations: a fifth of all.
READ = {
    "layers": ("layer", "phase", *_COUNTED),
    "requests": ("request", *REQUEST_TIMES, "hits", "late", *_COUNTED),
    "request_layers": ("request", "layer", "phase", *_COUNTED),
}
REQUESTS, LAYERED = ({name: READ[name] for name in names} for names in (("requests",), ("layers", "request_layers")))
_OF_ENERGY = dict.fromkeys((*PHASE, *(name for names in SPENT.values() for name in names)))


def load(
    folder: Path, conditions: Sequence[str] = (), columns: Mapping[str, Collection[str]] = EVERYTHING
) -> pl.DataFrame:
    """Load every replayed configuration once, sorted by identity; those that meet all `conditions` (`read.filtered`).

    `columns` names the tables of rows of configurations that are loaded, and what of each; all of it if empty. Without
    all of layers, a column `decode` has the sums that energy needs, if a platform has watts.
    `latency` is what per-request rows add up to, or would, had a sweep kept them.

    Raises ResultError if a source is broken, there is no result, or none meets the conditions.
    """
    found = sources(folder)
    table = table_of(found, "configurations").filter(pl.col("error").is_null())
    if table.is_empty() and (folder / "zarr.json").exists():
        make = f"moereplay replay {typed(folder)} --out FOLDER"
        raise ResultError(f"no results in {folder}, which is a trace; make some with: {make}")
    if table.is_empty():
        raise ResultError(f"no results in {folder}; make some with: moereplay replay TRACE --out {typed(folder)}")
    table = _with_routing(table)
    names = _names()
    totals = [pl.col(heading).alias(names.get(heading, heading)) for heading in counters_in(table.columns)]
    full = [pl.col(name).alias(name.removesuffix(IN_FULL)) for name in table.columns if name.endswith(IN_FULL)]
    nested = table.select(
        "identity",
        "bound",
        pl.lit(ROWS_VERSION, pl.Int64).alias("rows_version"),
        pl.struct(settings_in(table.columns)).alias("config"),
        pl.struct("identity", *FACTS, pl.struct(full).alias("policies")).alias("about"),
        pl.struct(*totals, "time_ns", "lifetime").alias("totals"),
        pl.struct([name for name in LATENCIES if name != "requests"]).alias("latency"),
    )
    nested = filtered(_joined(nested, _bounds(found), "bound"), conditions).drop("identity", "bound")
    if columns.get("layers") != () and nested["about"].struct.field(IDLE).count():
        nested = _with(nested, _decoded(found))
    return with_rows(nested, found, columns)


def with_rows(frame: pl.DataFrame, found: Sequence[Source], columns: Mapping[str, Collection[str]]) -> pl.DataFrame:
    """Return configurations with their rows of these tables as lists, null where none are stored; see `load`."""
    for name, own in columns.items():
        frame = _with(frame, _lists(found, name, own, frame["about"].struct.field("identity")))
    return frame


def _with(frame: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    named = frame.with_columns(pl.col("about").struct.field("identity"))
    return _joined(named, right, "identity").drop("identity")


def _decoded(found: Sequence[Source]) -> pl.DataFrame:
    """Return a row per configuration with the sums of its layers' decode rows that energy is computed from."""
    sums = [
        rows.filter(pl.col("phase") == DECODE)
        .group_by("identity")
        .agg(pl.struct(pl.col(*_OF_ENERGY).sum()).alias(DECODE))
        for rows in frames_of(found, "layers", ("phase", *_OF_ENERGY))
    ]
    return pl.concat(sums)


def _with_routing(table: pl.DataFrame) -> pl.DataFrame:
    """Add the synthetic routing that earlier versions stated only in the model's name."""
    named = pl.col("model").str.strip_prefix(SYNTHETIC_MODEL).alias("synthetic")
    labelled = pl.col("label") + f", {SYNTHETIC}"
    older = pl.col("synthetic").is_null() & pl.col("model").str.starts_with(SYNTHETIC_MODEL)
    return table.with_columns(
        pl.when(older).then(labelled).otherwise("label").alias("label"),
        pl.when(older).then(named).otherwise("synthetic"),
    )


def errors(folder: Path) -> pl.DataFrame:
    """Return the configurations that have no result: identity, trace, settings and why."""
    table = table_of(sources(folder), "configurations")
    failed = table.filter(pl.col("error").is_not_null())
    return failed.select("identity", "trace", *settings_in(table.columns), "error")


def table_of(found: Iterable[Source], name: str) -> pl.DataFrame:
    """Return one table of all sources, as `frames_of` gives it; empty if no part has it."""
    return pl.concat(frames_of(found, name), rechunk=True)  # in one chunk, as in `together`


#: Values of a table that are in memory at once: 8 MB. Other rows are packed.
MOST_VALUES = 1 << 20


def frames_of(
    found: Iterable[Source], name: str, columns: Collection[str] = (), only: pl.Series | None = None
) -> Iterator[pl.DataFrame]:
    """Yield one table of all sources, of any versions, in order, without duplicate rows: one frame or more.

    `columns` and identities select some of it. A frame has all rows of its identities. Of duplicates, the row with the
    fewest nulls is kept: a result rather than an error, the counters of a newer version rather than the nulls of an
    older one. Raises ResultError naming a damaged or foreign source.
    """
    wanted = {*ORDER[name], *columns} if columns else ()
    base = pl.Schema({each: kind for each, kind in table_schemas()[name].items() if not wanted or each in wanted})
    layouts, held, packed = list[tuple[object, pl.Schema]](), list[pl.DataFrame](), dict[str, list[bytes]]()
    for each in found:
        table = each.frame(name, wanted)
        if table is None:
            continue
        layouts.append((each.path, table.schema))
        held.append(table if only is None else table.filter(pl.col("identity").is_in(only.implode())))
        if sum(own.height * own.width for own in held) > MOST_VALUES:
            _pack(together(schema_of(base, layouts), held), packed)
            held.clear()
    schema = schema_of(base, layouts)
    if packed:
        _pack(together(schema, held), packed)
    for group in sorted(packed) or [""]:
        frames = [pl.read_ipc(io.BytesIO(data)) for data in packed.pop(group)] if group else held
        yield _once(with_tokens(together(schema, frames)), name)


def _pack(rows: pl.DataFrame, packed: dict[str, list[bytes]]) -> None:
    """Add rows to those of their group, by the first digit of the identity, compressed."""
    for (group,), own in rows.group_by(pl.col("identity").str.head(1)):
        file = io.BytesIO()
        own.write_ipc(file, compression="zstd")
        packed.setdefault(str(group), []).append(file.getvalue())


def _once(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return rows in order, without duplicates."""
    if not rows.select(ORDER[name]).is_duplicated().any():
        return rows.sort(ORDER[name])
    nulls = pl.sum_horizontal(pl.all().is_null()).alias("nulls")
    spelled = [setting for setting in ("platform", "capacity") if setting in rows.columns]
    best_first = rows.with_columns(nulls).sort(*ORDER[name], "nulls", *spelled).drop("nulls")
    return best_first.unique(ORDER[name], keep="first", maintain_order=True)


def _bounds(found: Sequence[Source]) -> pl.DataFrame:
    return table_of(found, "bounds").select(pl.col("identity").alias("bound"), pl.struct(list(BOUNDS)).alias("bounds"))


def _lists(found: Sequence[Source], name: str, columns: Collection[str], identities: pl.Series) -> pl.DataFrame:
    """Return a row per configuration with its rows of another table as a list, in order."""
    nested = list[pl.DataFrame]()
    for rows in frames_of(found, name, columns, identities):
        inner = pl.struct(pl.all().exclude("rows_version", "identity")).alias(LISTS[name])
        groups = rows.rename(_names(), strict=False).group_by("identity", maintain_order=True)
        nested.append(groups.agg(inner))
    return pl.concat(nested, rechunk=True)


def _names() -> dict[str, str]:
    """Return counters by their column."""
    return {counter.heading: counter.name for counter in COUNTERS.values()}


def _joined(left: pl.DataFrame, right: pl.DataFrame, on: str) -> pl.DataFrame:
    return left.join(right, on=on, how="left", maintain_order="left")
