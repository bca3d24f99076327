"""Curve files: the columns of a row per curve, and a tidy frame with a row per curve and capacity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.files import damaged, read_parquet, write_frame
from moereplay.results.schema import row_digest
from moereplay.results.settings import OF_CURVES, older

VERB = "run moereplay curve"
CURVES_VERSION = 1  #: of the columns
_ABOUT = ("label", "identity", "trace", "model")
_CONFIG = ("policy", *OF_CURVES, "seed", "platform")  #: the seed is that of drafts, 0 without any
_NUMBERS = pl.List(pl.Int64)
#: Of a file.
SCHEMA = pl.Schema(
    {
        "curves_version": pl.Int64,
        "config": pl.Struct(dict.fromkeys(_CONFIG, pl.String)),
        "about": pl.Struct(
            dict.fromkeys(_ABOUT, pl.String)
            | {"semantics": pl.Int64, "experts": pl.Int64, "total_bytes": pl.Int64, "dense": pl.Boolean}
        ),
        "capacity_bytes": _NUMBERS,
        "misses": _NUMBERS,  # null where a machine's times decide
        "reached_misses": _NUMBERS,  # of a way, where `misses` are a bound; null where they are a count
        "complete_steps": _NUMBERS,  # null where misses are, or are a bound
        "replayed": pl.List(pl.Boolean),  # decided by replays on the platform
        "layer_misses": pl.List(_NUMBERS),
        "layer_complete": pl.List(_NUMBERS),
        "layer_steps": _NUMBERS,
        "layer_accesses": _NUMBERS,
        "layer_compulsory": _NUMBERS,
    }
)
#: Of what `load` returns.
TIDY = pl.Schema(
    dict.fromkeys((*_ABOUT, *_CONFIG), pl.String)
    | {"semantics": pl.Int64, "replayed": pl.Boolean}
    | dict.fromkeys(("percent", "hit_rate", "complete_share", "compulsory_limit"), pl.Float64)
)


def write_row(folder: Path, row: Mapping[str, Any]) -> Path:
    """Write a curve as `curve-<identity>.parquet`: the same settings replace their own file. Raises ResultError."""
    frame = pl.DataFrame([row], schema=SCHEMA)
    digest = row_digest(frame.row(0, named=True))
    path = folder / f"curve-{row['about']['identity']}.parquet"
    write_frame(frame.with_columns(pl.lit(digest).alias("digest")), path)
    return path


def load(folder: Path) -> pl.DataFrame:
    """Load every `curve-*.parquet` of `folder`, by rising capacity; the frame may be empty.

    `percent` is of all expert bytes; `hit_rate` is null if it depends on a machine's times, or without accesses; it is
    `replayed` where those of `platform` have. `complete_share`, of steps, is null also in files of earlier versions.
    Raises ResultError naming the file that is broken, foreign or newer than this code.
    """
    rows = [row for path in sorted(folder.glob("curve-*.parquet")) for row in _curves(path)]
    return pl.DataFrame(rows, schema=TIDY, orient="row").sort("identity", "percent")


def _curves(path: Path) -> list[dict[str, object]]:
    frame = read_parquet(path, VERB)
    _check(path, frame)
    return [point for row in frame.iter_rows(named=True) for point in _points(row)]


def _check(path: Path, frame: pl.DataFrame) -> None:
    if frame.schema.get("curves_version") != pl.Int64 or frame.is_empty():
        raise ResultError(f"{path} holds no curve (curves_version is missing); move it elsewhere")
    for row in frame.iter_rows(named=True):
        if row["curves_version"] > CURVES_VERSION:
            raise ResultError(f"{path} is newer than this version reads ({CURVES_VERSION}); upgrade moereplay")
        if row.get("digest") != row_digest(row):
            raise damaged(path, VERB)


def _points(row: dict) -> list[dict[str, object]]:
    accesses, compulsory = sum(row["layer_accesses"]), sum(row["layer_compulsory"])
    later = {name: default for name, default in older().items() if name in OF_CURVES} | {"seed": "0"}
    shared = {name: row["about"][name] for name in (*_ABOUT, "semantics")} | later | row["config"]
    shared["compulsory_limit"] = _hit_rate(compulsory, accesses)
    steps, complete = sum(row.get("layer_steps") or ()), row.get("complete_steps") or [None] * len(row["misses"])
    return [
        shared
        | {"percent": 100 * at / row["about"]["total_bytes"], "hit_rate": _hit_rate(misses, accesses)}
        | {"complete_share": None if whole is None or not steps else whole / steps, "replayed": replayed}
        for at, misses, whole, replayed in zip(
            row["capacity_bytes"], row["misses"], complete, row["replayed"], strict=True
        )
    ]


def _hit_rate(misses: int | None, accesses: int) -> float | None:
    return None if misses is None or not accesses else (accesses - misses) / accesses
