"""Fit the memory rates of compute: of dense weights, of routed experts, and of experts in a separate format.

A token of a run reads the same bytes of both every time, so one demand identifies one rate. Runs whose experts are
another share of a token's bytes (other models, other numbers of experts per token) identify two. Otherwise the
platform that supplies the other figures may state their ratio; without one, a single rate stands for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import least_squares

from moereplay.calibration.link_fit import TIE, Figure, jackknifed, robust
from moereplay.calibration.prediction import loading_ms
from moereplay.calibration.runs import Run
from moereplay.simulator.platform import Platform, Roofline
from moereplay.traces.texts import counted
from moereplay.traces.units import GB, MS
from moereplay.traces.weight_formats import MIXTURES

#: Experts per byte of dense weights must differ by this factor between runs to identify two rates.
OTHER_DEMAND = 1.5
DENSE, EXPERTS = "memory_bytes_per_s", "expert_bytes_per_s"


def fit_compute(runs: Sequence[Run], base: Platform, warnings: list[str]) -> tuple[Platform, dict[str, Figure]]:
    """Fit the memory rates, on runs that log loading separately if there are any."""
    timed = [run for run in runs if run.median("compute_ms") and not run.foreign_time]
    apart = [run for run in timed if _apart(run)]
    _warn_of_others(timed, apart, base, warnings)
    chosen = apart or timed
    usual = [run for run in chosen if _format(run) is None] or chosen
    if not usual:
        return base, {}
    ratio = base.tried.expert_rate if base.tried else None
    if _identified(usual):
        figures = jackknifed(usual, lambda some: _two_rates(some, base, ratio))
    else:
        warnings.append(_one_demand(ratio, base))
        figures = jackknifed(usual, lambda some: _one_rate(some, base, ratio))
    fitted = _with_rates(base, figures, {})
    formats = {name for run in chosen if run not in usual and (name := _format(run))}
    for name in sorted(formats):
        figures |= _format_figure(name, [run for run in chosen if _format(run) == name], fitted)
    rates = {name: figures[f"formats.{name}"].value for name in formats}
    return _with_rates(base, figures, rates), figures


def _identified(runs: Sequence[Run]) -> bool:
    """Return True if the runs' experts are shares of a token's bytes that differ enough for two rates."""
    if not all(run.sizes.dense_bytes for run in runs):
        return False
    shares = [run.demand_bytes / (run.sizes.dense_bytes or 1) for run in runs]
    return max(shares) > OTHER_DEMAND * min(shares)


def _one_demand(ratio: float | None, base: Platform) -> str:
    if ratio is None:
        return "one demand per token: a single rate is used for dense weights and experts; other models may differ"
    return (
        "one demand per token: dense weights and experts share one fitted rate; "
        f"the ratio of their rates, {ratio:g}, is assumed as {base.name} states it"
    )


def _two_rates(runs: Sequence[Run], base: Platform, ratio: float | None) -> dict[str, float]:
    """Fit both rates; the base platform's ratio, if stated, keeps noise between runs from separating them."""
    seconds = np.array([_seconds(run, base) for run in runs])
    dense = np.array([run.sizes.dense_bytes or 0 for run in runs])
    experts = np.array([run.demand_bytes for run in runs])

    def errors(place: np.ndarray) -> np.ndarray:
        rates = np.exp(place)
        tie = TIE * (place[1] - place[0] - np.log(ratio)) if ratio else 0.0
        return np.append(robust(np.log((dense / rates[0] + experts / rates[1]) / seconds)), tie)

    start = np.log(float(np.median((dense + experts) / seconds)))
    bounds = (start - np.log(20), start + np.log(20))  # a rate beyond that is not identified
    found = np.exp(least_squares(errors, [start, start], bounds=bounds, xtol=1e-12, ftol=1e-14).x)
    return {DENSE: float(found[0]), EXPERTS: float(found[1])}


def _one_rate(runs: Sequence[Run], base: Platform, ratio: float | None) -> dict[str, float]:
    """Return the median of the runs' rates; with a ratio, experts are read at that share of the rate of the others."""
    rates = [((run.sizes.dense_bytes or 0) + run.demand_bytes / (ratio or 1)) / _seconds(run, base) for run in runs]
    found = _median(rates)
    return {DENSE: found} | ({EXPERTS: found * ratio} if ratio else {})


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
    compute = _median_ms(run) - (inside if run.cached else 0) - started / MS
    return max(compute, 1e-3) / 1000


def _median_ms(run: Run) -> float:
    """Return the median token's time without waits and loading, in ms.

    The parts of a token are skewed and their medians do not add up; the time of the median token is what is predicted.
    """
    log, waits = run.series, getattr(run.series, "io_ms" if run.serial else "stall_ms", None)
    if log is None or waits is None:
        return run.median("compute_ms") or 0.0
    others = waits if log.mgmt_ms is None else waits + log.mgmt_ms
    return float(np.median(log.wall_ms) - np.median(others))


def _format_rate(run: Run, fitted: Platform) -> float:
    """Return bytes per second of experts alone, with dense bytes at the usual rate."""
    assert isinstance(fitted.compute, Roofline)
    dense = (run.sizes.dense_bytes or 0) / fitted.compute.memory_bytes_per_s
    return run.demand_bytes / max(_seconds(run, fitted) - dense, 1e-6)


def _with_rates(base: Platform, figures: dict[str, Figure], formats: dict[str, float]) -> Platform:
    flops = base.compute.flops if isinstance(base.compute, Roofline) else 1e15
    launch = base.compute.launch_ns if isinstance(base.compute, Roofline) else 0
    experts = figures[EXPERTS].value if EXPERTS in figures else None
    compute = Roofline(
        flops=flops,
        memory_bytes_per_s=figures[DENSE].value,
        expert_bytes_per_s=experts,
        launch_ns=launch,
        formats=formats,
    )
    return base.model_copy(update={"compute": compute})


def _warn_of_others(timed: Sequence[Run], apart: Sequence[Run], base: Platform, warnings: list[str]) -> None:
    inside = [run for run in timed if run not in apart]
    if not (apart and inside):
        return

    def rate(run: Run) -> float:
        return _one_rate([run], base, None)[DENSE] / GB

    rates = sorted(rate(run) for run in inside)
    warnings.append(
        f"excluded from the rate of compute, because they log loading inside compute: {counted(len(inside), 'run')}; "
        "the remainder implies "
        f"{rates[0]:.1f} to {rates[-1]:.1f} GB/s, the others {_median(rate(run) for run in apart):.1f}"
    )
