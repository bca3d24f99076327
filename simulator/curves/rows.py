"""Curves as Parquet: one row per curve, its capacities and misses as lists; written whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import polars as pl

from results.result import Row, row_digest
from results.settings import OF_CURVES
from results.write import write_frame
from simulator.config import SEMANTICS_VERSION
from simulator.curves.curve import UNDECIDED, Curve
from traces.schema import canonical

CURVES_VERSION = 1
CONFIG = pl.Struct(dict.fromkeys(("policy", *OF_CURVES, "platform"), pl.String))
ABOUT = pl.Struct(
    dict.fromkeys(("label", "identity", "trace", "model"), pl.String)
    | {"semantics": pl.Int64, "experts": pl.Int64, "total_bytes": pl.Int64, "dense": pl.Boolean}
)
NUMBERS = pl.List(pl.Int64)
SCHEMA = pl.Schema(
    {
        "curves_version": pl.Int64,
        "config": CONFIG,
        "about": ABOUT,
        "capacity_bytes": NUMBERS,
        "misses": NUMBERS,  # null where a machine's times decide
        "replayed": pl.List(pl.Boolean),  # decided by replays on the platform
        "layer_misses": pl.List(NUMBERS),
        "layer_accesses": NUMBERS,
        "layer_compulsory": NUMBERS,
    }
)


def to_row(curve: Curve) -> Row:
    """The document that `curve --json` prints."""
    config = {"policy": curve.policy} | {name: getattr(curve.config, name) for name in OF_CURVES}
    about = {"label": "SIMULATED", "identity": _identity(curve, config), "trace": curve.trace, "model": curve.model}
    return {
        "curves_version": CURVES_VERSION,
        "config": config | {"platform": curve.platform},
        "about": about
        | {"semantics": SEMANTICS_VERSION, "experts": curve.experts}
        | {"total_bytes": curve.total_bytes, "dense": curve.dense},
        "capacity_bytes": curve.capacity_bytes.tolist(),
        "misses": _known(curve.misses.tolist()),
        "replayed": curve.replayed.tolist(),
        "layer_misses": [_known(row) for row in curve.layer_misses.tolist()],
        "layer_accesses": curve.layer_accesses.tolist(),
        "layer_compulsory": curve.layer_compulsory.tolist(),
    }


def write_curve(folder: Path, curve: Curve) -> Path:
    """Write `curve-<identity>.parquet`: the same settings replace their own file. Raises ConfigError."""
    row = to_row(curve)
    frame = pl.DataFrame([row], schema=SCHEMA)
    digest = row_digest(frame.row(0, named=True))
    path = folder / f"curve-{row['about']['identity']}.parquet"
    write_frame(frame.with_columns(pl.lit(digest).alias("digest")), path)
    return path


def _identity(curve: Curve, config: Row) -> str:
    """Of the demand, not of the machine: a curve whose gaps a machine has filled replaces the one with gaps."""
    return hashlib.sha256(canonical([SEMANTICS_VERSION, curve.trace, config])).hexdigest()[:16]


def _known(misses: list[int]) -> list[int | None]:
    return [None if count == UNDECIDED else count for count in misses]
