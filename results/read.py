"""Result files become frames: one nested row per configuration, or tidy rows of numbers beside their configuration.

A tidy frame has a column per configuration field, per fact of `ABOUT_FIELDS` and per counter, those of the files: one
that older results lack is null there, one that only newer ones have is passed on. A counter with the name of a setting
has the column that its declaration says: `capacity` is what the user asked for, `capacity_misses` the misses.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import polars as pl

from results.columns import with_config
from results.counters import heading_of
from results.digest import is_damaged, row_digest
from results.errors import ResultError, unknown
from results.labels import ESTIMATE
from results.schema import BOUNDS, ROWS_VERSION, rows_schema, together
from traces.documents import content

MOST_BYTES = 1 << 30  #: of one file of results
ABOUT_FIELDS = ("identity", "label", "model", "trace", "semantics", "capacity_bytes", "capacity_forms", "token_cycles")
#: Fields that lead a table.
LEADING = ("model", "trace", "eviction", "prefetch", "miss", "routing", "capacity")
#: What every part must hold: nested column -> the fields that are read by name. A counter may be missing.
NEEDED: dict[str, tuple[str, ...]] = {
    "config": ("eviction", "prefetch", "miss", "routing", "capacity", "platform", "contract", "scope", "passes"),
    "about": (*ABOUT_FIELDS, "policies"),
    "totals": ("time_ns",),
    "bounds": tuple(BOUNDS),
    "per_layer": ("layer", "phase"),
    "per_request": ("request", "ttft_ns", "decode_ns", "decode_passes"),
}


def load(folder: Path) -> pl.DataFrame:
    """Every `part-*.parquet` of `folder`, one nested row per configuration, in the order of their file names.

    Parts of several versions go together. Raises ResultError if there is none, or naming the part that is broken or
    foreign, or whose layout is newer than this code.
    """
    paths = sorted(folder.glob("part-*.parquet"))
    if not paths:
        raise ResultError(f"no results in {folder}; make some with: moereplay replay TRACE --out {folder}")
    parts = []
    for path in paths:
        part = read_rows(path)
        check_columns(path, part.schema, NEEDED)
        check_digests(path, part)
        parts.append((path, with_config(part)))
    return together(rows_schema(), parts)


def runs(frame: pl.DataFrame) -> pl.DataFrame:
    """One tidy row per configuration: its totals, `time_ns`, and its bounds as `bound_*` (null if not computed)."""
    totals, bounds = pl.col("totals").struct, pl.col("bounds").struct
    counters = [name for name in _inner(frame.schema["totals"]) if name != "lifetime"]
    return frame.select(
        *_identifying(frame),
        *(totals.field(name).alias(heading_of(name)) for name in counters),
        *(bounds.field(name).alias(f"bound_{name}") for name in BOUNDS),
    )


def layers(frame: pl.DataFrame) -> pl.DataFrame:
    """One tidy row per configuration, layer and phase ("prefill", "decode"); a phase without steps has no row."""
    return _exploded(frame, "per_layer")


def requests(frame: pl.DataFrame) -> pl.DataFrame:
    """One tidy row per configuration and request, in run order; times in ns, `ttft_ns` null without a prefill."""
    return _exploded(frame, "per_request")


def only(frame: pl.DataFrame, **wanted: str | Collection[str]) -> pl.DataFrame:
    """The configurations whose fields have one of the wanted values: `only(frame, contract="atomic")`.

    `trace` takes the beginning of a digest. Raises ResultError naming the field, or the values it has.
    """
    for field, values in wanted.items():
        if field not in fields(frame):
            raise unknown("configuration field", field, fields(frame))
        allowed = [values] if isinstance(values, str) else list(values)
        kept = frame.filter(_matches(frame, field, allowed))
        if kept.is_empty():
            found = ", ".join(sorted(set(frame.select(_column(frame, field).cast(pl.String)).to_series())))
            raise ResultError(f"no result has {field} = {' or '.join(allowed)}; found {found}")
        frame = kept
    return frame


def filtered(frame: pl.DataFrame, conditions: Sequence[str]) -> pl.DataFrame:
    """`only` with conditions as typed, `eviction=lru,fifo`. Raises ResultError."""
    for condition in conditions:
        field, equals, values = condition.partition("=")
        if not equals:
            raise ResultError(f"condition {condition!r}: write setting=value, for example eviction=lru,fifo")
        frame = only(frame, **{field.strip(): values.split(",")})
    return frame


def label_of(frame: pl.DataFrame) -> str:
    """What all figures of these rows must be read as: SIMULATED, or open-loop if any of them is."""
    labels = set(frame.select(pl.col("about").struct.field("label")).to_series())
    return " / ".join(sorted(labels))


def seconds_of(frame: pl.DataFrame) -> str:
    """What the times of these rows rest on, in words; results of before were estimates."""
    about = frame.schema["about"]
    if not isinstance(about, pl.Struct) or "calibration" not in _inner(about):
        return ESTIMATE
    calibrations = frame.select(pl.col("about").struct.field("calibration")).to_series()
    known = ", ".join(sorted(set(calibrations.drop_nulls())))
    if calibrations.null_count() and known:
        return f"calibrated in part ({known}), else {ESTIMATE}"
    return f"calibrated ({known})" if known else ESTIMATE


def fields(frame: pl.DataFrame) -> list[str]:
    """What tells configurations apart, most telling first."""
    return list(dict.fromkeys([*LEADING, *_inner(frame.schema["config"]), "semantics"]))


def read_rows(path: Path, verb: str = "replay") -> pl.DataFrame:
    """The rows of one file that `verb` wrote. Raises ResultError if it is broken, foreign or newer than this code."""
    part = read_parquet(path, verb)
    version = part["rows_version"].max() if part.schema.get("rows_version") == pl.Int64 else None
    if not isinstance(version, int):
        raise _foreign(path, "rows_version")
    if version > ROWS_VERSION:
        raise ResultError(f"{path} has rows_version {version}, newer than {ROWS_VERSION}; upgrade moereplay to read it")
    return part


def check_digests(path: Path, part: pl.DataFrame, verb: str = "replay") -> None:
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
        found = set(_inner(schema.get(column)))
        if absent := [name for name in needed if name not in found]:
            raise _foreign(path, f"{column}.{absent[0]}")


def damaged(path: Path, verb: str) -> ResultError:
    """The refusal of a file that is not what was written."""
    return ResultError(f"{path} is damaged: its content does not match its digest; delete it and {verb} again")


def _foreign(path: Path, missing: str) -> ResultError:
    return ResultError(f"{path} holds no replay results ({missing} is missing); move it elsewhere")


def _inner(dtype: pl.DataType | None) -> list[str]:
    """Field names of a struct or of a list of structs."""
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    return [field.name for field in inner.fields] if isinstance(inner, pl.Struct) else []


def _exploded(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    tidy = frame.select(*_identifying(frame), column).explode(column, empty_as_null=False)
    inner = _inner(frame.schema[column])
    renamed = pl.col(column).struct.rename_fields([heading_of(name) for name in inner])
    return tidy.with_columns(renamed).unnest(column)


def _identifying(frame: pl.DataFrame) -> list[pl.Expr]:
    named = [_column(frame, name).alias(name) for name in _inner(frame.schema["config"])]
    return named + [pl.col("about").struct.field(name) for name in ABOUT_FIELDS]


def _column(frame: pl.DataFrame, field: str) -> pl.Expr:
    """A field of the configuration or of its surroundings; lists become text, so that they compare and print."""
    if field in ABOUT_FIELDS:
        return pl.col("about").struct.field(field)
    column, kinds = pl.col("config").struct.field(field), frame.schema["config"]
    if not (isinstance(kinds, pl.Struct) and isinstance(kinds.to_schema()[field], pl.List)):
        return column
    pair = pl.element().list.eval(pl.element().cast(pl.String)).list.join(":")
    return column.list.eval(pair).list.join(" ")


def _matches(frame: pl.DataFrame, field: str, allowed: list[str]) -> pl.Expr:
    text = _column(frame, field).cast(pl.String)
    if field == "trace":
        return pl.any_horizontal(text.str.starts_with(start) for start in allowed)
    return text.is_in(allowed)
