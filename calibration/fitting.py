"""Fit a platform to measured runs: compute by weight format, loading, page faults and the link; and its warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moereplay.calibration.link_fit import Figure, fit_line, fit_link, jackknifed, waits_of
from moereplay.calibration.prediction import PUBLISHED, Prediction, loading_ms, measured, predicted, summary
from moereplay.calibration.runs import MIB, Run
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Calibration, Platform, Roofline
from moereplay.simulator.platforms import sealed
from moereplay.traces.geometry import recognised
from moereplay.traces.texts import counted
from moereplay.traces.units import GB, MS
from moereplay.traces.weight_formats import MIXTURES

#: Ratio of mean to median time per token above which a run has outliers that the model does not describe.
OUTLIERS = 1.15


@dataclass(frozen=True)
class Fitted:
    """A calibrated platform, its figures by name, and the runs of the fit."""

    platform: Platform
    figures: dict[str, Figure]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]

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
    about = Calibration(device=runs[0].device, method=method, date=_date(runs), cells=len(runs), models=models_of(runs))
    lanes = max(run.lanes or machine.links[0].depth for run in runs)
    links = tuple(link.model_copy(update={"depth": lanes}) for link in machine.links)
    known = {"name": runs[0].device, "summary": _summary(runs), "source": "", "links": links, "calibration": about}
    made = sealed(machine.model_copy(update=known))
    found = Fitted(made, figures, tuple(runs), tuple(warnings))
    error = summary(found.on_itself)["mape"]
    known["calibration"] = about.model_copy(update={"mape": error})
    return Fitted(sealed(machine.model_copy(update=known)), figures, tuple(runs), tuple(warnings))


def models_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the models of the runs by name with their mean dense bytes per token, 0 if unknown."""
    found: dict[str, list[float]] = {}
    for run in runs:
        name = run.cell.text("model")
        like = recognised(name)
        found.setdefault(like.name if like else name, []).append(run.sizes.dense_bytes or 0)
    return {name: round(sum(sizes) / len(sizes)) for name, sizes in sorted(found.items()) if name}


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
        return {"ns_per_mib": _median(_ns_per_mib(run) for run in some)}

    figures = jackknifed(telling, fitted)
    loading = base.loading.model_copy(update={"ns_per_mib": round(figures["ns_per_mib"].value), "ns_per_expert": 0})
    return base.model_copy(update={"loading": loading}), figures


def fit_faults(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """Fit compute in ns per major page fault: the slope per run, the median over runs. Return the base with it."""
    slopes = [slope for run in runs if (slope := _ns_per_fault(run)) is not None]
    if not slopes:
        return base, {}
    figures = jackknifed(slopes, lambda some: {"fault_ns": _median(some)})
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


def fit_compute(runs: Sequence[Run], base: Platform, warnings: list[str]) -> tuple[Platform, dict[str, Figure]]:
    """Fit the memory rate by weight format, on runs that log loading separately if there are any."""
    timed = [run for run in runs if run.median("compute_ms") and not run.foreign_time]
    apart = [run for run in timed if _apart(run)]
    _warn_of_others(timed, apart, base, warnings)
    chosen = apart or timed
    usual = [run for run in chosen if _format(run) is None] or chosen
    if not usual:
        return base, {}
    figures = jackknifed(usual, lambda some: {"memory_bytes_per_s": _median(_rate(run, base) for run in some)})
    fitted = _with_rates(base, figures["memory_bytes_per_s"].value, {})
    formats = {name for run in chosen if run not in usual and (name := _format(run))}
    for name in sorted(formats):
        figures |= _format_figure(name, [run for run in chosen if _format(run) == name], fitted)
    rates = {name: figures[f"formats.{name}"].value for name in formats}
    return _with_rates(base, figures["memory_bytes_per_s"].value, rates), figures


def _format_figure(name: str, runs: Sequence[Run], fitted: Platform) -> dict[str, Figure]:
    return jackknifed(runs, lambda some: {f"formats.{name}": _median(_format_rate(run, fitted) for run in some)})


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _apart(run: Run) -> bool:
    """Return True if the run logs loading separately from compute."""
    return run.mean("mgmt_ms") is not None


def _format(run: Run) -> str | None:
    """Return the weight format of experts that differs from the rest of the model; mixtures apply to a whole file."""
    named = run.sizes.weight_format
    return named if named and named not in MIXTURES else None


def _seconds(run: Run, base: Platform) -> float:
    """Return the compute of the median token in seconds, without launches and without loading."""
    inside = 0.0 if _apart(run) else float(np.median(loading_ms(base, run)))
    launch = base.compute.launch_ns if isinstance(base.compute, Roofline) else 0
    started = run.sizes.layers * (1 + run.sizes.k) * launch + run.sizes.layers * base.loading.gate_ns
    compute = (run.median("compute_ms") or 0) - (inside if run.cached else 0) - started / MS
    return max(compute, 1e-3) / 1000


def _rate(run: Run, base: Platform) -> float:
    """Return bytes per second over all bytes that a token reads."""
    return ((run.sizes.dense_bytes or 0) + run.demand_bytes) / _seconds(run, base)


def _format_rate(run: Run, fitted: Platform) -> float:
    """Return bytes per second of experts alone, with dense bytes at the usual rate."""
    assert isinstance(fitted.compute, Roofline)
    dense = (run.sizes.dense_bytes or 0) / fitted.compute.memory_bytes_per_s
    return run.demand_bytes / max(_seconds(run, fitted) - dense, 1e-6)


def _with_rates(base: Platform, rate: float, formats: dict[str, float]) -> Platform:
    flops = base.compute.flops if isinstance(base.compute, Roofline) else 1e15
    launch = base.compute.launch_ns if isinstance(base.compute, Roofline) else 0
    compute = Roofline(flops=flops, memory_bytes_per_s=rate, launch_ns=launch, formats=formats)
    return base.model_copy(update={"compute": compute})


def _warn_of_others(timed: Sequence[Run], apart: Sequence[Run], base: Platform, warnings: list[str]) -> None:
    inside = [run for run in timed if run not in apart]
    if not (apart and inside):
        return
    rates = sorted(_rate(run, base) / GB for run in inside)
    usual = float(np.median([_rate(run, base) for run in apart])) / GB
    warnings.append(
        f"excluded from the rate of compute, as they log loading inside compute: {counted(len(inside), 'run')}; "
        "the remainder implies "
        f"{rates[0]:.1f} to {rates[-1]:.1f} GB/s, the others {usual:.1f}"
    )
