"""A curve as the row that `curve --json` prints and that `results.curves` stores."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moereplay.results.curves import CURVES_VERSION, write_row
from moereplay.results.remarks import with_routing
from moereplay.results.result import Row
from moereplay.results.settings import OF_CURVES
from moereplay.simulator.config import SEMANTICS_VERSION
from moereplay.simulator.curves.curve import UNDECIDED, Curve
from moereplay.traces.schema import canonical


def to_row(curve: Curve) -> Row:
    """The document that `curve --json` prints."""
    config = {"policy": curve.policy} | {name: getattr(curve.config, name) for name in OF_CURVES}
    about = {"label": with_routing("SIMULATED", curve.synthetic), "identity": _identity(curve, config)}
    about |= {"trace": curve.trace, "model": curve.model}
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
    """Write `curve-<identity>.parquet`: the same settings replace their own file. Raises ResultError."""
    return write_row(folder, to_row(curve))


def _identity(curve: Curve, config: Row) -> str:
    """Of the demand, not of the machine: a curve whose gaps a machine has filled replaces the one with gaps."""
    return hashlib.sha256(canonical([SEMANTICS_VERSION, curve.trace, config])).hexdigest()[:16]


def _known(misses: list[int]) -> list[int | None]:
    return [None if count == UNDECIDED else count for count in misses]
