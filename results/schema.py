"""Columns of results: names, types, and the conversion of files of earlier versions.

A row of `replay --out` is nested as the JSON document is; the tables of a sweep are flat:

configurations  one row per configuration: settings, totals, latencies; `error` gives the reason for missing totals
layers          one row per configuration, layer and phase
requests        one row per configuration and request, if the experiment asks for them
request_layers  one row per configuration, request, layer and phase with an access, as the requests; many only if asked
bounds          one row per count that bounds hit rates; `configurations.bound` points here

Settings and policies are those that the writer names, counters those that are declared. A reader knows this version's
columns, takes others as they are, and fills what a file lacks with null.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from moereplay.results.counters import BY_LAYER, COUNTERS, REQUEST_TIMES, WATTS, Rows, heading_of
from moereplay.results.errors import ResultError
from moereplay.results.settings import older, setting_kinds
from moereplay.traces.documents import canonical_digest

Columns = dict[str, Any]  #: name -> what polars takes for a type

ROWS_VERSION = 1  #: of the nested rows
#: By the kind of a setting; `pairs` are [layer, expert].
DTYPES: Columns = {
    "text": pl.String,
    "integer": pl.Int64,
    "number": pl.Float64,
    "flag": pl.Boolean,
    "pairs": pl.List(pl.List(pl.Int64)),
}
#: Facts about a result in addition to its configuration; `calibration` is null where seconds are estimated,
#: `synthetic` where the routing was recorded; `uncalibrated` says why they are although the platform is calibrated,
#: `assumed` the assumption on dense weights; `band` the measured error of such times
#: where they were measured, and its ends are measured / predicted; watts are null without `[power]` of the platform.
_TEXTS = (
    *("label", "seconds", "calibration", "trace", "model", "capacity_forms", "warning", "synthetic"),
    *("uncalibrated", "assumed", "band"),
)
FACTS: Columns = dict.fromkeys(_TEXTS, pl.String) | {
    "semantics": pl.Int64,
    "capacity_bytes": pl.Int64,
    "side_bytes": pl.Int64,
    "token_cycles": pl.Float64,
    "band_least": pl.Float64,
    "band_most": pl.Float64,
    **dict.fromkeys(WATTS, pl.Float64),
}
LIFETIME: Columns = {"lifetime": pl.List(pl.Int64)}
#: Bounds of hits: null if Belady's are not a bound; accesses; misses at any capacity; hits of a way to evict,
#: where experts of a pool differ in bytes.
BOUNDS: Columns = dict.fromkeys(("belady_hits", "accesses", "compulsory", "feasible_hits"), pl.Int64)
LATENCIES: Columns = {
    "requests": pl.Int64,
    "ttft_mean_ns": pl.Float64,  #: over the requests that have a prefill
    "ttft_median_ns": pl.Float64,
    "decode_ns": pl.Int64,  #: summed over requests; divided by decode_tokens it is the TPOT
    "decode_passes": pl.Int64,
    "decode_tokens": pl.Int64,
}
IN_FULL = "_in_full"  #: ends the column of a policy with every parameter, defaults included
#: Columns that order a table of a sweep and identify its rows.
ORDER = {
    "configurations": ["identity"],
    "layers": ["identity", "layer", "phase"],
    "requests": ["identity", "request"],
    "request_layers": ["identity", "request", "layer", "phase"],
    "bounds": ["identity"],
}
_LAYER: Columns = {"layer": pl.Int64, "phase": pl.String}
_REQUEST: Columns = {"request": pl.Int64} | dict.fromkeys(REQUEST_TIMES, pl.Int64)
_KEY: Columns = {"rows_version": pl.Int64, "identity": pl.String}


def rows_schema(kinds: Mapping[str, str] | None = None, policies: Iterable[str] = ()) -> pl.Schema:
    """Return the schema of nested rows: `kinds` of the settings, and `policies` that `about.policies` spells out."""
    settings = {name: DTYPES[kind] for name, kind in (kinds or {}).items()}
    about = {"label": pl.String, "identity": pl.String} | FACTS
    about |= {"policies": pl.Struct(dict.fromkeys(policies, pl.String))}
    totals = dict.fromkeys(COUNTERS, pl.Int64) | {"time_ns": pl.Int64} | LIFETIME
    return pl.Schema(
        {"rows_version": pl.Int64, "config": pl.Struct(settings), "about": pl.Struct(about)}
        | {"totals": pl.Struct(totals), "bounds": pl.Struct(BOUNDS)}
        | {"per_layer": pl.List(pl.Struct(_LAYER | _counters("layer") | LIFETIME))}
        | {"per_request": pl.List(pl.Struct(_REQUEST | _counters("request")))}
    )


def table_schemas(kinds: Mapping[str, str] | None = None, policies: Iterable[str] = ()) -> dict[str, pl.Schema]:
    """Return the schemas of a sweep's tables, by name."""
    settings = {name: DTYPES[kind] for name, kind in (kinds or {}).items()}
    spelled_out = {f"{policy}{IN_FULL}": pl.String for policy in policies}
    totals = {counter.heading: pl.Int64 for counter in COUNTERS.values()} | {"time_ns": pl.Int64} | LIFETIME
    outcome: Columns = {"bound": pl.String, "error": pl.String}
    return {
        "configurations": pl.Schema(_KEY | outcome | settings | FACTS | spelled_out | totals | LATENCIES),
        "layers": pl.Schema(_KEY | _LAYER | _counters("layer", flat=True) | LIFETIME),
        "requests": pl.Schema(_KEY | _REQUEST | _counters("request", flat=True)),
        "request_layers": pl.Schema(
            _KEY | {"request": pl.Int64} | _LAYER | {heading_of(name): pl.Int64 for name in BY_LAYER}
        ),
        "bounds": pl.Schema(_KEY | BOUNDS),
    }


def fields_of(dtype: pl.DataType | None) -> list[str]:
    """Return field names of a struct or of a list of structs."""
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    return [field.name for field in inner.fields] if isinstance(inner, pl.Struct) else []


def _counters(per: Rows, flat: bool = False) -> Columns:
    counted = [counter for counter in COUNTERS.values() if per in counter.per]
    return {counter.heading if flat else counter.name: pl.Int64 for counter in counted}


def settings_in(configurations: Sequence[str]) -> list[str]:
    """Return the columns of a table that are settings, by their position in the file."""
    return _between(configurations, "error", next(iter(FACTS)))


def counters_in(configurations: Sequence[str]) -> list[str]:
    """Return the columns of a table that are counters, including those of other versions."""
    # Policies in full precede the facts that the file of an earlier version lacks, and follow those that it has.
    *_, last = (name for name in configurations if name in FACTS or name.endswith(IN_FULL))
    return _between(configurations, last, "time_ns")


def _between(names: Sequence[str], before: str, after: str) -> list[str]:
    return list(names[names.index(before) + 1 : names.index(after)])


def nested(
    documents: Sequence[Mapping[str, Any]],
    bounds: Sequence[Mapping[str, int | None] | None],
    kinds: Mapping[str, str],
) -> pl.DataFrame:
    """Return one row per document of `Result.to_json`, with a digest. All documents must have the same settings."""
    rows = [
        {**document, "rows_version": ROWS_VERSION, "bounds": bound}
        for document, bound in zip(documents, bounds, strict=True)
    ]
    return with_digests(pl.DataFrame(rows, schema=rows_schema(kinds, documents[0]["about"]["policies"])))


def with_digests(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, with a digest of the content of each."""
    digests = [row_digest(row) for row in frame.iter_rows(named=True)]
    return frame.with_columns(pl.Series("digest", digests, pl.String))


def together(schema: pl.Schema, found: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate frames of `schema_of`; missing values are null."""
    empty = pl.DataFrame(schema=schema)
    # in one chunk: polars rounds the quotients of a chunk of one row in another way
    return pl.concat([empty, *(_filled(frame, schema) for frame in found)], rechunk=True)


def schema_of(base: pl.Schema, found: Iterable[tuple[object, pl.Schema]]) -> pl.Schema:
    """Return the columns of `base` and of every layout, in an order that does not depend on that of the layouts.

    Each layout comes with its name for errors. Raises ResultError if a column has different types.
    """
    schema, layouts = base, list[tuple[object, pl.Schema]]()
    for where, layout in found:
        if all(layout != known for _, known in layouts):
            layouts.append((where, layout))
    for where, layout in sorted(layouts, key=lambda each: str(each[1])):
        try:
            schema = _joined_fields(schema, layout)
        except TypeError as conflict:
            raise ResultError(
                f"{where} has unexpected columns: {conflict}; use separate folders for different versions"
            ) from None
    return schema


def _filled(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    """Cast a nested column, which fills the fields that it lacks."""
    own = frame.schema  # polars rebuilds it each time
    lacking = [pl.lit(None, kind).alias(name) for name, kind in schema.items() if name not in own]
    other: Any = {name: kind for name, kind in schema.items() if own.get(name, kind) != kind}
    return frame.cast(other).with_columns(lacking).select(schema.names())


def _joined_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any], inside: str = "") -> pl.Schema:
    """Return the columns of both; a new column is inserted after the one that it follows in `theirs`."""
    kinds = {
        name: _joined(ours[name], theirs[name], f"{inside}{name}") if name in ours and name in theirs else kind
        for name, kind in {**theirs, **ours}.items()
    }
    return pl.Schema({name: kinds[name] for name in _in_order(list(ours), list(theirs))})


def _in_order(ours: list[str], theirs: Collection[str]) -> list[str]:
    order, at = list(ours), 0
    for name in theirs:
        if name not in order:
            order.insert(at, name)
        at = order.index(name) + 1
    return order


def _joined(ours: pl.DataType, theirs: pl.DataType, column: str) -> pl.DataType:
    """Return the type that holds both. Raises TypeError naming the column."""
    if isinstance(ours, pl.Struct) and isinstance(theirs, pl.Struct):
        fields = _joined_fields(ours.to_schema(), theirs.to_schema(), f"{column}.")
        return pl.Struct(fields)
    if isinstance(ours, pl.List) and isinstance(theirs, pl.List):
        return pl.List(_joined(_instance(ours.inner), _instance(theirs.inner), column))
    if ours == theirs or theirs == pl.Null:
        return ours
    if ours == pl.Null:
        return theirs
    raise TypeError(f"{column} holds {theirs}, not {ours}")


def _instance(kind: Any) -> pl.DataType:
    return kind() if isinstance(kind, type) else kind


# -- Digests of stored data: of every row, and of every file of replays, curves and validations.

#: In the metadata of a Parquet file: sha256 of the file, with zeros where the digest stands.
FILE_DIGEST = "moereplay.sha256"
NO_DIGEST = "0" * 64


def row_digest(row: Mapping[str, Any]) -> str:
    """Return sha256 of a stored row without its digest: polars checks no page of a Parquet file that it reads."""
    content = {name: value for name, value in row.items() if name != "digest"}
    return canonical_digest(content)


def with_file_digest(data: bytes) -> bytes:
    """Return a Parquet file that was written with the metadata {FILE_DIGEST: NO_DIGEST}, with its digest there."""
    place = _file_digest(data)
    if place is None:
        raise AssertionError("the file was written without a place for its digest")
    return data[: place[0]] + hashlib.sha256(data).hexdigest().encode() + data[place[1] :]


def is_damaged(data: bytes) -> bool:
    """Return True if the content of a file contradicts its digest; files of earlier versions have none."""
    place = _file_digest(data)
    if place is None:
        return False
    blank = data[: place[0]] + NO_DIGEST.encode() + data[place[1] :]
    return hashlib.sha256(blank).hexdigest().encode() != data[slice(*place)]


def _file_digest(data: bytes) -> tuple[int, int] | None:
    """Find the begin and end of the digest: two bytes after its name, which hold Thrift's type and length of a text."""
    name = data.rfind(FILE_DIGEST.encode())  # metadata follow all rows
    begin = name + len(FILE_DIGEST) + 2
    return None if name < 0 else (begin, begin + len(NO_DIGEST))


# -- Results of versions that had fewer settings (`results/settings.py`) get them, with the values that they had.


def with_config(part: pl.DataFrame) -> pl.DataFrame:
    """Return results of any version, their column `config` with the settings that it lacks."""
    config = with_settings(part.select("config").unnest("config"))
    return part.with_columns(config.to_struct("config"))


def with_tokens(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table of any version with the decoded tokens: before there were drafts, each pass gave one."""
    if "decode_tokens" not in table.columns:
        return table
    return table.with_columns(pl.coalesce("decode_tokens", "decode_passes").alias("decode_tokens"))


def with_settings(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table of configurations of any version, with the settings that it lacks: each had its default."""
    found, kinds = table.columns, setting_kinds()
    absent = {name: value for name, value in older().items() if name not in found}
    if not absent:
        return table
    first = min(found.index(name) for name in kinds if name in found)
    names = dict.fromkeys([*found[:first], *(name for name in kinds if name in found or name in absent), *found])
    filled = [pl.lit(value, DTYPES[kinds[name]]).alias(name) for name, value in absent.items()]
    return table.with_columns(filled).select(list(names))
