"""Fit a platform to measured runs: compute, loading, page faults and the link; and its warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moereplay.calibration.compute_fit import fit_compute
from moereplay.calibration.link_fit import Figure, fit_line, fit_link, jackknifed, waits_of
from moereplay.calibration.prediction import PUBLISHED, Prediction, band_of, measured, predicted, summary
from moereplay.calibration.runs import MIB, Run
from moereplay.simulator.calibration import Calibration
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import sealed
from moereplay.traces.geometry import recognised
from moereplay.traces.texts import counted
from moereplay.traces.units import MS

#: Ratio of mean to median time per token above which a run has outliers that the model does not describe.
OUTLIERS = 1.15


@dataclass(frozen=True)
class Fitted:
    """A calibrated platform, its figures by name, and the runs of the fit."""

    platform: Platform
    figures: dict[str, Figure]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]

    def knowing(self, held: Sequence[Prediction]) -> Fitted:
        """Return the fit with the error of held-out runs in its platform's calibration."""
        about = self.platform.calibration
        assert about is not None  # `fit` wrote it
        known = about.model_copy(update={"held_out": band_of(held)})
        return replace(self, platform=sealed(self.platform.model_copy(update={"calibration": known})))

    @property
    def device(self) -> str:
        """Name of the measured machine."""
        return self.runs[0].device

    @property
    def on_itself(self) -> list[Prediction]:
        """Predictions of the runs of the fit."""
        return [prediction(self.platform, run, "fit") for run in self.runs]


def fit(runs: Sequence[Run], base: Platform, method: str) -> Fitted:
    """Fit a platform to runs of one device and record `method` in it. Raises ConfigError if the runs do not suffice."""
    _check(runs, base)
    warnings: list[str] = []
    machine, figures = _fitted(runs, base, warnings)
    warnings += _warnings(runs)
    about = Calibration(
        device=runs[0].device,
        method=method,
        date=_date(runs),
        cells=len(runs),
        models=models_of(runs),
        expert_bytes=expert_bytes_of(runs),
        parts=("link",),
        serial_bytes_per_s=figures["serial_bytes_per_s"].value if "serial_bytes_per_s" in figures else None,
    )
    lanes = max(run.lanes or machine.links[0].depth for run in runs)
    links = tuple(link.model_copy(update={"depth": lanes}) for link in machine.links)
    known = {"name": runs[0].device, "summary": _summary(runs), "source": "", "links": links, "calibration": about}
    known |= {"tried": None}
    made = sealed(machine.model_copy(update=known))
    found = Fitted(made, figures, tuple(runs), tuple(warnings))
    error = summary(found.on_itself)["mape"]
    known["calibration"] = about.model_copy(update={"mape": error})
    return Fitted(sealed(machine.model_copy(update=known)), figures, tuple(runs), tuple(warnings))


def models_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the models of the runs by name with their mean dense bytes per token, 0 if unknown."""
    found = _by_model(runs, lambda run: run.sizes.dense_bytes or 0)
    return {name: round(sum(sizes) / len(sizes)) for name, sizes in found.items()}


def expert_bytes_of(runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Return the fewest and the most bytes of an expert in the runs of each model."""
    found = _by_model(runs, lambda run: run.sizes.expert_bytes)
    return {name: (round(min(sizes)), round(max(sizes))) for name, sizes in found.items()}


def _by_model(runs: Sequence[Run], size: Callable[[Run], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in runs:
        name = run.cell.text("model")
        like = recognised(name)
        found.setdefault(like.name if like else name, []).append(size(run))
    return {name: sizes for name, sizes in sorted(found.items()) if name}


def _check(runs: Sequence[Run], base: Platform) -> None:
    devices = sorted({run.device for run in runs})
    if not devices:
        raise ConfigError("no run to fit on: expected runs with a time per token and hits or bytes")
    if len(devices) > 1:
        raise ConfigError(
            f"runs of several devices ({', '.join(devices)}): expected one; run calibrate once per device"
        )
    if len(base.links) > 1:
        raise ConfigError(f"invalid --base {base.name}: expected a platform with one link")


def _fitted(runs: Sequence[Run], base: Platform, warnings: list[str]) -> tuple[Platform, dict[str, Figure]]:
    waits = waits_of(runs)
    if not waits or not any(run.median("compute_ms") and not run.foreign_time for run in runs):
        timed = [run for run in runs if not run.foreign_time]
        warnings.append(
            "no run that reads experts logs the parts of its time: "
            "compute and link are fitted as a line over missed bytes"
        )
        return fit_line(timed, base)
    machine, loading = fit_loading(runs, base)
    machine, compute = fit_compute(runs, machine, warnings)
    machine, link = fit_link(waits, machine)
    machine, faults = fit_faults(runs, machine)
    return machine, compute | link | loading | faults


def _date(runs: Sequence[Run]) -> str:
    """Return the date of the latest run."""
    return max(run.cell.text("date") for run in runs)


def _summary(runs: Sequence[Run]) -> str:
    models = ", ".join(sorted({run.cell.text("model") for run in runs}))
    return f"{runs[0].device} as calibrated on {counted(len(runs), 'run')} of {models}"


def _warnings(runs: Sequence[Run]) -> list[str]:
    found = [f"{run.name}: its time is excluded from compute: {run.foreign_time}" for run in runs if run.foreign_time]
    for run in runs:
        mean, median = run.mean("wall_ms"), run.median("wall_ms")
        if mean and median and mean > OUTLIERS * median:
            times = f"{mean / median:.2f} times"
            found.append(f"{run.name}: the mean token took {times} the median one; such outliers are not modelled")
        if run.sizes.dense_bytes is None:
            found.append(f"{run.name}: unknown dense bytes; the compute rate holds for this model only")
    lengths = {run.sizes.expert_bytes for run in runs}
    if len(lengths) == 1:
        found.append("all runs read experts of one size; times of other sizes are unknown")
    return found


def prediction(platform: Platform, run: Run, role: str) -> Prediction:
    """Predict a run on the platform from its published figures."""
    found = predicted(platform, run)
    return Prediction(
        cell=run.name,
        device=run.device,
        role=role,
        basis=PUBLISHED,
        reason=f"its time is not compared: {run.foreign_time}" if run.foreign_time else "",
        predicted=found,
        measured=measured(run, found),
        compared=not run.foreign_time,
    )


# -- compute, loading and page faults

FAULTS = 50  #: mean per token; with fewer faults their cost is not identifiable


def fit_loading(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """Fit loading in ns per MiB: the ratio of sums per run, the median over runs. Return the base with it."""
    telling = [run for run in runs if run.cached and run.mean("mgmt_ms") is not None and run.missed_bytes.any()]
    if not telling:
        return base, {}

    def fitted(some: Sequence[Run]) -> dict[str, float]:
        return {"ns_per_mib": float(np.median([_ns_per_mib(run) for run in some]))}

    figures = jackknifed(telling, fitted)
    loading = base.loading.model_copy(update={"ns_per_mib": round(figures["ns_per_mib"].value), "ns_per_expert": 0})
    return base.model_copy(update={"loading": loading}), figures


def fit_faults(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """Fit compute in ns per major page fault: the slope per run, the median over runs. Return the base with it."""
    slopes = [slope for run in runs if (slope := _ns_per_fault(run)) is not None]
    if not slopes:
        return base, {}
    figures = jackknifed(slopes, lambda some: {"fault_ns": float(np.median(some))})
    return base.model_copy(update={"fault_ns": round(figures["fault_ns"].value)}), figures


def _ns_per_fault(run: Run) -> float | None:
    """Regress compute on faults over tokens; None for a run with too few faults."""
    series = run.series
    if series is None or series.majflt is None or series.compute_ms is None or series.majflt.mean() < FAULTS:
        return None
    slope, _ = np.polyfit(series.majflt, series.compute_ms, 1) if series.majflt.std() else (0.0, 0.0)
    return float(slope) * MS if slope > 0 else None


def _ns_per_mib(run: Run) -> float:
    return (run.mean("mgmt_ms") or 0) * MS / (float(run.missed_bytes.mean()) / MIB)
