"""Compute's figures: bytes per second by weight format, and what having an expert loaded costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moereplay.calibration.link_fit import Figure, jackknifed
from moereplay.calibration.prediction import MS, loading_ms
from moereplay.calibration.runs import MIB, Run
from moereplay.simulator.platform import Platform, Roofline
from moereplay.traces.weight_formats import MIXTURES

FAULTS = 50  #: per token, on average: with fewer, their price drowns in everything else


def fit_loading(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """The base with nanoseconds per MiB that loading takes: of each run the sum over the sum, of runs the median."""
    telling = [run for run in runs if run.cached and run.mean("mgmt_ms") is not None and run.missed_bytes.any()]
    if not telling:
        return base, {}

    def fitted(some: Sequence[Run]) -> dict[str, float]:
        return {"ns_per_mib": _median(_ns_per_mib(run) for run in some)}

    figures = jackknifed(telling, fitted)
    loading = base.loading.model_copy(update={"ns_per_mib": round(figures["ns_per_mib"].value), "ns_per_expert": 0})
    return base.model_copy(update={"loading": loading}), figures


def fit_faults(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """The base with nanoseconds of compute per major page fault: of each run the slope, of runs the median."""
    slopes = [slope for run in runs if (slope := _ns_per_fault(run)) is not None]
    if not slopes:
        return base, {}
    figures = jackknifed(slopes, lambda some: {"fault_ns": _median(some)})
    return base.model_copy(update={"fault_ns": round(figures["fault_ns"].value)}), figures


def _ns_per_fault(run: Run) -> float | None:
    """Least squares of tokens' compute over their faults; None for a run that faults too seldom to tell."""
    series = run.series
    if series is None or series.majflt is None or series.compute_ms is None or series.majflt.mean() < FAULTS:
        return None
    slope, _ = np.polyfit(series.majflt, series.compute_ms, 1) if series.majflt.std() else (0.0, 0.0)
    return float(slope) * MS if slope > 0 else None


def _ns_per_mib(run: Run) -> float:
    return (run.mean("mgmt_ms") or 0) * MS / (float(run.missed_bytes.mean()) / MIB)


def fit_compute(runs: Sequence[Run], base: Platform, warnings: list[str]) -> tuple[Platform, dict[str, Figure]]:
    """The base with its memory's rate by format. Runs that logged management apart decide, where there are any."""
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
    """Whether what was spent on loading is not inside compute."""
    return run.mean("mgmt_ms") is not None


def _format(run: Run) -> str | None:
    """A format of the experts that is unlike the rest of the model's; mixtures are what a whole file is stored in."""
    named = run.sizes.weight_format
    return named if named and named not in MIXTURES else None


def _seconds(run: Run, base: Platform) -> float:
    """Compute of the median token without launches, and without loading where that is inside."""
    inside = 0.0 if _apart(run) else float(np.median(loading_ms(base, run)))
    launch = base.compute.launch_ns if isinstance(base.compute, Roofline) else 0
    started = run.sizes.layers * (1 + run.sizes.k) * launch + run.sizes.layers * base.loading.gate_ns
    compute = (run.median("compute_ms") or 0) - (inside if run.cached else 0) - started / MS
    return max(compute, 1e-3) / 1000


def _rate(run: Run, base: Platform) -> float:
    """Bytes per second over everything that a token reads."""
    return ((run.sizes.dense_bytes or 0) + run.demand_bytes) / _seconds(run, base)


def _format_rate(run: Run, fitted: Platform) -> float:
    """The same of the experts alone, what is dense being read at the usual rate."""
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
    rates = sorted(_rate(run, base) / 1e9 for run in inside)
    usual = float(np.median([_rate(run, base) for run in apart])) / 1e9
    warnings.append(
        f"{len(inside)} runs log management inside compute and do not decide its rate; what is left of it implies "
        f"{rates[0]:.1f} to {rates[-1]:.1f} GB/s, the others {usual:.1f}: a machine in their state is that much slower"
    )
