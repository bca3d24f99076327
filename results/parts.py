"""Parts: tables that are written atomically, with a provenance document that describes them, in a folder or a bucket.

`replay --out` writes one part per configuration, `sweep run` one per few seconds of work, `sweep merge` one in total.

OUT/part-2f61c0/configurations.parquet  layers.parquet  bounds.parquet  requests.parquet  request_layers.parquet
OUT/part-2f61c0/provenance.json

Every reader goes through the checks of this file: the provenance by its own digest, the part's name by what it holds,
the files that are there by the list, and the content of each by its sha256, before anything parses it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from moereplay.results.counters import COUNTERS, heading_of
from moereplay.results.errors import ResultError
from moereplay.results.result import Result, Row, prefill_times, request_times
from moereplay.results.schema import FACTS, IN_FULL, ORDER, table_schemas, with_settings
from moereplay.traces.documents import canonical_digest, content, from_json, json_text

SWEEP_VERSION = 1  #: of the tables' columns
TABLES = ("configurations", "layers", "requests", "request_layers", "bounds")
PARTS = "part-*"
PROVENANCE = "provenance.json"
MOST_BYTES = 1 << 30  #: of one file of results


class PartError(ResultError):
    """A part is damaged or is not a part; the message names the file and the fix."""


@dataclass(frozen=True)
class Part:
    """Tables as Parquet files by name, and the identities that they contain, by kind."""

    files: Mapping[str, bytes]  #: table -> file
    #: configuration | bound | requests | request_layers | error -> identities
    holds: Mapping[str, Sequence[str]]

    @property
    def name(self) -> str:
        """The part's name, derived from its content: two writers of one part write the same files."""
        return _name_of(self.holds, self._digests())

    def documents(self, provenance: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the part's files by name, in writing order: the provenance, which has their digests, comes last."""
        document = {"holds": self.holds, "sha256": self._digests(), **provenance}
        document = json.loads(json_text(document))  # as a reader will see it
        document["digest"] = _digest_of(document)
        tables = {_file(table): data for table, data in self.files.items()}
        return tables | {PROVENANCE: json_text(document, indent=1, sort_keys=True).encode()}

    def _digests(self) -> dict[str, str]:
        return {_file(table): hashlib.sha256(data).hexdigest() for table, data in self.files.items()}


@dataclass(frozen=True)
class StoredPart:
    """A part in a folder, already checked; the content of each table is checked when it is read."""

    path: Path
    provenance: Mapping[str, Any]

    def frame(self, name: str, columns: Collection[str] = ()) -> pl.DataFrame | None:
        """Return a table, or some columns of it; None if the part has none.

        Raises PartError if it is damaged, missing or not a table.
        """
        data = self._content(name)
        if data is None:
            return None
        try:
            there = [each for each in pl.read_parquet_schema(io.BytesIO(data)) if each in columns] or None
            table = pl.read_parquet(io.BytesIO(data), columns=there)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            raise PartError(f"{self.path}: its {name} cannot be read as Parquet; remove it and replay again") from None
        if lacking := [key for key in ORDER[name] if key not in table.columns]:
            raise PartError(f"{self.path}: its {name} lack the column {lacking[0]}; remove it and replay again")
        return with_settings(table) if name == "configurations" else table

    def check(self) -> None:
        """Read every file. Raises PartError for the first that is missing or damaged."""
        for name in TABLES:
            self._content(name)

    def _content(self, name: str) -> bytes | None:
        file = _file(name)
        if file not in self.provenance["sha256"]:
            return None
        try:
            data = content(self.path / file, MOST_BYTES)
        except OSError as error:
            raise _missing(self.path, file, error.strerror or str(error)) from None
        check_table(data, file, self.provenance, self.path)
        return data


def stored_parts(folder: Path) -> Iterator[StoredPart]:
    """Yield the parts of a folder, sorted by name. Raises PartError for the first broken one."""
    for path in sorted(set(folder.glob(PARTS)).difference(older_files(folder))):
        try:
            data = content(path / PROVENANCE, MOST_BYTES)
            there = [file.name for file in path.iterdir()]
        except OSError as error:
            raise _no_part(path, error) from None
        yield StoredPart(path, parsed(data, path, there))


def older_files(folder: Path) -> list[Path]:
    """List the `part-*.parquet` files that `replay --out` wrote until November 2026, each with a provenance file."""
    return [path for ending in (".parquet", f".{PROVENANCE}") for path in folder.glob(PARTS + ending) if path.is_file()]


def parsed(data: bytes, where: Path | str, there: Collection[str]) -> dict[str, Any]:
    """Return the provenance of a part; errors name `where`, its folder or URL. `there` lists the part's files.

    Raises PartError if it is damaged or of a newer version, or if the part has other files than it lists.
    """
    provenance = _document(data, where)
    version = provenance["sweep_version"]
    if version > SWEEP_VERSION:
        raise PartError(f"{where} has version {version}, newer than {SWEEP_VERSION}; upgrade moereplay")
    if "digest" in provenance and provenance["digest"] != _digest_of(provenance):  # the first parts had none
        raise _damaged(where, PROVENANCE)
    _check_name(provenance, where)
    _check_files(provenance, where, there)
    return provenance


def check_table(data: bytes, file: str, provenance: Mapping[str, Any], where: Path | str) -> None:
    """Raise PartError if a file does not match the part's provenance."""
    if hashlib.sha256(data).hexdigest() != provenance["sha256"][file]:
        raise _damaged(where, file)


def stored(provenances: Iterable[Mapping[str, Any]], *wanted: str) -> set[tuple[str, str]]:
    """Return the keys of the jobs that need not run again; a configuration that ended in an error may.

    `wanted` names further tables whose rows a configuration must have: requests, request_layers.
    """
    held: dict[str, set[str]] = {what: set() for what in ("configuration", "bound", *wanted)}
    for provenance in provenances:
        for what, identities in provenance["holds"].items():
            held.setdefault(what, set()).update(identities)
    configurations = held["configuration"].intersection(*(held[table] for table in wanted))
    return {("configuration", name) for name in configurations} | {("bound", name) for name in held["bound"]}


def _file(table: str) -> str:
    return f"{table}.parquet"


def _name_of(holds: Mapping[str, Sequence[str]], digests: Mapping[str, str]) -> str:
    content = json_text([holds, digests], sort_keys=True)
    return f"part-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _digest_of(provenance: Mapping[str, Any]) -> str:
    return canonical_digest({name: provenance[name] for name in provenance if name != "digest"})


def _document(data: bytes, where: Path | str) -> dict[str, Any]:
    """Return JSON of the expected shape."""
    try:
        found = from_json(data)
        identities = [identity for held in found["holds"].values() for identity in held]
        texts = all(isinstance(text, str) for text in (*identities, *found["sha256"].values()))
        if not (texts and isinstance(found["sweep_version"], int)):
            raise ValueError("its provenance has different values")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_part(where, error) from None
    return found


def _check_name(provenance: Mapping[str, Any], where: Path | str) -> None:
    expected = _name_of(provenance["holds"], provenance["sha256"])
    if str(where).replace("\\", "/").rpartition("/")[2] != expected:
        raise PartError(
            f"{where} contains results of {expected}: it was renamed, or its provenance is damaged; "
            "rename it back, or remove it and replay again"
        )


def _check_files(provenance: Mapping[str, Any], where: Path | str, there: Collection[str]) -> None:
    """Check that exactly the listed files exist; hidden files are ignored."""
    listed, known = {*provenance["sha256"], PROVENANCE}, {*map(_file, TABLES), PROVENANCE}
    if foreign := sorted(listed - known):
        raise _no_part(where, f"it names a file {foreign[0]!r}")
    if gone := sorted(listed.difference(there)):
        raise _missing(where, gone[0], "its provenance lists it")
    if more := sorted(name for name in there if name not in listed and not name.startswith(".")):
        raise PartError(
            f"{where}/{more[0]} is not listed in the part's provenance; move it elsewhere if it is yours, "
            f"else remove {where} and replay again"
        )


def _no_part(where: object, why: object) -> PartError:
    return PartError(f"invalid part {where} ({why}); remove it and replay again")


def _missing(where: object, file: str, why: str) -> PartError:
    return PartError(f"{where}/{file} is missing ({why}); remove {where} and replay again")


def _damaged(where: object, file: str) -> PartError:
    return PartError(f"{where}/{file} is damaged; remove {where} and replay again")


ROWS_PER_GROUP = 1 << 14  #: fixed, so that equal tables are equal bytes; some 10 MB in memory

Rows = dict[str, list[Row]]


def key(identity: str) -> Row:
    """Return the columns that every table has."""
    return {"rows_version": SWEEP_VERSION, "identity": identity}


def rows_of(result: Result, bound: str | None, requests: bool = True) -> Rows:
    """Return the rows that one result adds to each table; `bound` is the identity of the count that bounds it."""
    identity = result.about["identity"]
    rows = {"configurations": [_configuration(result, bound)], "layers": _each(identity, result.per_layer)}
    return rows | ({"requests": _each(identity, result.per_request)} if requests else {})


def part_of(result: Result, bound: str | None, counted: Mapping[str, int | None] | None) -> Part:
    """Make a part of one result and the bounds of its hits."""
    rows, holds = rows_of(result, bound), {name: [result.about["identity"]] for name in ("configuration", "requests")}
    layered = {}
    if result.request_layers:
        layered["request_layers"] = frame_bytes(by_layer_of(result))
        holds["request_layers"] = holds["requests"]
    if bound is not None and counted is not None:
        rows["bounds"], holds["bound"] = [key(bound) | dict(counted)], [bound]
    schemas = table_schemas(result.kinds, result.about["policies"])
    return Part({name: to_parquet(table, schemas[name]) for name, table in rows.items() if table} | layered, holds)


_REQUEST_LAYERS = table_schemas()["request_layers"]


def by_layer_of(result: Result) -> pl.DataFrame:
    """Return the table `request_layers` of a result: columns, because rows as dictionaries would take longer."""
    many = len(result.request_layers["request"])
    about = {name: [value] * many for name, value in key(result.about["identity"]).items()}
    columns = about | _counters(result.request_layers)
    return pl.DataFrame(columns, schema={name: _REQUEST_LAYERS[name] for name in columns})


def to_parquet(rows: Iterable[Row], schema: pl.Schema) -> bytes:
    """Return the rows of a table as Parquet bytes."""
    return frame_bytes(pl.DataFrame(list(rows), schema=schema))


def frame_bytes(frame: pl.DataFrame) -> bytes:
    """Return a table as a Parquet file; equal tables give equal bytes."""
    file = io.BytesIO()
    frame.rechunk().write_parquet(file, compression="zstd", row_group_size=ROWS_PER_GROUP)
    return file.getvalue()


def streamed_bytes(frames: Iterator[pl.DataFrame]) -> bytes:
    """Return the same file of a table that comes in frames, which are not in memory together; empty without a row."""
    first = next(frames)
    if first.is_empty():
        return b""
    file, groups = io.BytesIO(), _in_groups(chain([first], frames))
    table = register_io_source(lambda *_: groups, schema=first.schema)
    table.sink_parquet(file, compression="zstd", row_group_size=ROWS_PER_GROUP)
    return file.getvalue()


def _in_groups(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the same rows in frames of a row group each."""
    left: list[pl.DataFrame] = []
    for frame in frames:
        rows = pl.concat([*left, frame])
        whole = len(rows) - len(rows) % ROWS_PER_GROUP
        yield from (_copied(rows, at, ROWS_PER_GROUP) for at in range(0, whole, ROWS_PER_GROUP))
        left = [_copied(rows, whole, len(rows) - whole)]
    yield from (rows for rows in left if len(rows))


def _copied(rows: pl.DataFrame, at: int, many: int) -> pl.DataFrame:
    """Return rows without those around them in memory, by whose lists polars would divide theirs into pages."""
    return rows.select(pl.all().gather(pl.int_range(at, at + many)))


def latencies(requests: Sequence[Mapping[str, Any]]) -> Row:
    """Sum the rows of requests: the columns of `LATENCIES`."""
    first, times = prefill_times(requests), request_times(requests)
    return {
        "requests": len(requests),
        "ttft_mean_ns": float(mean(first)) if first else None,
        "ttft_median_ns": float(median(first)) if first else None,
        "decode_ns": times["decode_ns"],
        "decode_passes": sum(row["decode_passes"] or 0 for row in requests),
        "decode_tokens": times["decode_tokens"],
    }


def _configuration(result: Result, bound: str | None) -> Row:
    about = {name: value for name, value in result.about.items() if name in FACTS}
    full = {f"{kind}{IN_FULL}": text for kind, text in result.about["policies"].items()}
    own = key(result.about["identity"]) | {"bound": bound, "error": None}
    return own | result.config | about | full | _counters(result.totals) | latencies(result.per_request)


def _each(identity: str, rows: Iterable[Row]) -> list[Row]:
    return [key(identity) | _counters(row) for row in rows]


_HEADINGS = {name: heading_of(name) for name in COUNTERS}


def _counters(row: Mapping[str, Any]) -> Row:
    return {_HEADINGS.get(name, name): value for name, value in row.items()}
