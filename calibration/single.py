"""Single runs, each a per-token log: predicted by a calibration, by replay where their routing is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from moereplay.calibration.fitting import prediction
from moereplay.calibration.prediction import REPLAY, Prediction, measured
from moereplay.calibration.replayed import replayed
from moereplay.calibration.runs import MIB, RefusalError, Run
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform

ROLE = "held_out"
#: What is printed of a run: column, words and decimals.
PRINTED = (
    ("tpot_ms", "time per token, mean", "ms"),
    ("tpot_median_ms", "time per token, median", "ms"),
    ("tok_s", "tokens per second", ""),
    ("hit_pct", "hits", "%"),
    ("read_mib_per_token", "read per token", "MiB"),
    ("compute_ms", "compute", "ms"),
    ("io_ms", "waiting for reads", "ms"),
    ("stall_ms", "waiting for reads", "ms"),
    ("mgmt_ms", "loading", "ms"),
)


def of_log(machine: Platform, run: Run, routing: Path | None) -> Prediction:
    """Predict a run by replay of its routing, else from the bytes of its log. Raises ConfigError or TraceError."""
    published = prediction(machine, run, ROLE)
    if routing is None:
        return replace(published, measured=_measured(run, published.predicted))
    try:
        found = replayed(machine, run, routing)
    except RefusalError as refusal:
        raise ConfigError(f"--trace {routing}: {refusal}") from None
    columns = found.columns
    return replace(published, basis=REPLAY, predicted=columns, measured=_measured(run, columns), more=found.more)


def _measured(run: Run, names: Iterable[str]) -> dict[str, float]:
    """What the log says of these columns; hits and bytes follow from the bytes that it read."""
    assert run.series is not None  # or it is no log
    read, wall = float(run.series.read_bytes.mean()), float(run.series.wall_ms.mean())
    hits = {"hit_pct": 100 * (1 - read / run.demand_bytes)} if run.cached else {}
    speed = {"tok_s": 1000 / wall} if wall else {}
    known = {"read_mib_per_token": read / MIB, **hits, **speed, **measured(run, names)}
    return {name: known[name] for name in names if name in known}


def rows(found: Prediction) -> list[dict[str, object]]:
    """One row per quantity: predicted beside measured."""
    error = found.error
    return [
        {
            "log": found.cell,
            "what": f"{words}, {unit}" if unit else words,
            "predicted": found.predicted[name],
            "measured": found.measured.get(name),
            "error": _error(name, found, error.get(name)),
        }
        for name, words, unit in PRINTED
        if name in found.predicted
    ]


def _error(name: str, found: Prediction, error: float | None) -> str:
    """Of hits in points, of the others in percent."""
    if name == "hit_pct" and name in found.measured:
        return f"{found.predicted[name] - found.measured[name]:+.1f} points"
    return "-" if error is None else f"{error:+.1%}"
