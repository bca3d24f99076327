"""What a calibrated platform says of a run, in the columns of cells.csv, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moereplay.calibration.files import Series
from moereplay.calibration.machine import as_run, compute_ms, loading_ms, waiting_ms
from moereplay.calibration.runs import Run
from moereplay.simulator.platform import Platform

#: What a run is judged by: the first of these that was measured.
TIMES = ("tpot_median_ms", "tpot_ms")
PUBLISHED, REPLAY = "published", "replay"
Columns = Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """One cell: predicted, measured and the error of each column, or the reason why it is not predicted."""

    cell: str
    device: str
    role: str  #: fit, held_out
    basis: str = ""  #: published, replay
    reason: str = ""  #: of a refusal; of a prediction whose time is not compared
    predicted: Columns = field(default_factory=dict)
    measured: Columns = field(default_factory=dict)
    compared: bool = True  #: whether its time counts in summaries
    more: Mapping[str, object] = field(default_factory=dict)  #: what only this basis tells

    @property
    def refused(self) -> bool:
        """Whether nothing is predicted."""
        return not self.predicted

    @property
    def error(self) -> dict[str, float]:
        """predicted / measured - 1 by column, where both are known and something was measured."""
        both = {name: (value, self.measured[name]) for name, value in self.predicted.items() if name in self.measured}
        return {name: value / was - 1 for name, (value, was) in both.items() if was}

    @property
    def time_error(self) -> float | None:
        """Of the time per token; None if none was measured, or it does not count."""
        errors = self.error
        return next((errors[name] for name in TIMES if name in errors), None) if self.compared else None

    def document(self) -> dict[str, object]:
        """As `moereplay evidence --json` prints it."""
        return {
            "cell": self.cell,
            "device": self.device,
            "status": "refused" if self.refused else "predicted",
            "reason": self.reason,
            "basis": self.basis,
            "role": self.role,
            "measured": rounded(self.measured),
            "predicted": rounded(self.predicted),
            "error": rounded(self.error),
            **self.more,
        }


def rounded(columns: Columns) -> dict[str, float]:
    """As documents print them: six digits."""
    return {name: float(f"{value:.6g}") for name, value in columns.items()}


def predicted(platform: Platform, run: Run) -> dict[str, float]:
    """The columns that published hits and bytes tell, each of the mean token but for the median one's time."""
    machine = as_run(platform, run)
    compute, waiting, loading = compute_ms(machine, run), waiting_ms(machine, run), loading_ms(machine, run)
    each = compute + waiting + loading
    return columns(run, compute, waiting, loading) | {"tpot_median_ms": float(np.median(each))}


def columns(run: Run, compute: float, waiting: np.ndarray, loading: np.ndarray) -> dict[str, float]:
    """Means per token: times in milliseconds, tokens per second."""
    tpot = compute + float(waiting.mean()) + float(loading.mean())
    waited = {"io_ms" if run.serial else "stall_ms": float(waiting.mean())}
    speed = {"tok_s": 1000 / tpot} if tpot else {}
    return {"tpot_ms": tpot, **speed, "compute_ms": compute, **waited, "mgmt_ms": float(loading.mean())}


def measured(run: Run, names: Iterable[str]) -> dict[str, float]:
    """What the row has of these columns, else what its log says."""
    known = {name: run.cell.amount(name) for name in names}
    logged = {} if run.series is None else _logged(run, run.series)
    found = {name: logged.get(name) if value is None else value for name, value in known.items()}
    return {name: value for name, value in found.items() if value is not None}


def _logged(run: Run, series: Series) -> dict[str, float | None]:
    """Columns as a log tells them: means per token, and the median token's time."""
    parts = {name: run.mean(name) for name in ("compute_ms", "io_ms", "stall_ms", "mgmt_ms")}
    return parts | {"tpot_ms": float(series.wall_ms.mean()), "tpot_median_ms": float(np.median(series.wall_ms))}


def summary(predictions: Sequence[Prediction]) -> dict[str, object]:
    """How far predictions are off, over those whose time counts; null where there is none."""
    known = [(error, each.cell) for each in predictions if (error := each.time_error) is not None]
    if not known:
        return {"cells": 0, "median_abs_error": None, "mape": None, "bias": None, "worst": None, "worst_cell": None}
    values = np.array([error for error, _ in known])
    worst, worst_cell = max(known, key=lambda each: abs(each[0]))
    return {
        "cells": len(known),
        "median_abs_error": float(np.median(np.abs(values))),
        "mape": float(np.abs(values).mean()),
        "bias": float(values.mean()),
        "worst": worst,
        "worst_cell": worst_cell,
    }
