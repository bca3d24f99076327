"""Curve files become a tidy frame: a row per curve and capacity, its hit rate beside the settings that it holds for."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from results.errors import ResultError
from results.read import damaged, read_parquet
from results.result import row_digest
from results.settings import OF_CURVES

VERB = "run moereplay curve"
CURVES_VERSION = 1  #: the newest layout that this code reads
ABOUT = ("label", "identity", "trace", "model")
COLUMNS = (*ABOUT, "policy", *OF_CURVES, "platform")
SCHEMA = pl.Schema(
    dict.fromkeys(COLUMNS, pl.String)
    | {"semantics": pl.Int64, "replayed": pl.Boolean}
    | dict.fromkeys(("percent", "hit_rate", "compulsory_limit"), pl.Float64)
)


def load(folder: Path) -> pl.DataFrame:
    """Every `curve-*.parquet` of `folder`, capacities rising; without any, no rows.

    `percent` is of all expert bytes; `hit_rate` is null where a machine's times decide, and without accesses; it is
    `replayed` where those of `platform` have.
    Raises ResultError naming the file that is broken, foreign or newer than this code.
    """
    rows = [row for path in sorted(folder.glob("curve-*.parquet")) for row in _curves(path)]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row").sort("identity", "percent")


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
    shared = {name: row["about"][name] for name in (*ABOUT, "semantics")} | row["config"]
    shared["compulsory_limit"] = _hit_rate(compulsory, accesses)
    return [
        shared
        | {"percent": 100 * at / row["about"]["total_bytes"], "hit_rate": _hit_rate(misses, accesses)}
        | {"replayed": replayed}
        for at, misses, replayed in zip(row["capacity_bytes"], row["misses"], row["replayed"], strict=True)
    ]


def _hit_rate(misses: int | None, accesses: int) -> float | None:
    return None if misses is None or not accesses else (accesses - misses) / accesses
