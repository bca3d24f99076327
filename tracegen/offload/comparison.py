"""Compare measured with simulated runs: figures of a run, agreement of its accesses, and the errors of all runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from moereplay.results.checks import side_of
from moereplay.results.result import Event
from moereplay.tracegen.offload.bench import Ran
from moereplay.tracegen.offload.study import Cell, Measurement
from moereplay.traces.units import MB, MS

#: How the engine classifies an access, in the words of its log.
VERDICTS = ("hits", "late", "compulsory", "collisions", "capacity")
#: Columns of a table of runs that may be left out, in that order, and the meaning of the others.
SPARE = ("alike", "decided", "closure")
LEGEND = (
    "ms: of a decoded token (TPOT); error: simulated / measured - 1; decided: by whom, see --decisions",
    "closure: the error of a replay with the measured durations; alike: accesses of one outcome in both",
)
COUNTED = ("hits", "late", "misses")
PARTS = ("dense", "expert", "stall")  #: parts of the time of a pass, without misses that a CPU computes


def figures(ran: Ran) -> dict[str, float | int | None]:
    """Return the times in milliseconds, their parts and bytes per pass, and counts of one run."""
    passes = len(ran.pass_ns)
    times = side_of(ran.result, passes).model_dump(exclude={"hit_rate"})
    parts = {f"{name}_ms": ran.result.totals[f"{name}_ns"] / passes / MS for name in PARTS}
    return times | parts | {name: ran.result.totals[name] for name in COUNTED}


def agreement(measured: Sequence[Event], simulated: Sequence[Event]) -> dict[str, int | None]:
    """Return the numbers of all accesses and of equally classified ones, and the first pass with a difference."""
    ours, theirs = _verdicts(measured), _verdicts(simulated)
    different = [place for place, verdict in ours.items() if theirs.get(place) != verdict]
    first = min((place[0] for place in different), default=None)
    return {"accesses": len(ours), "same": len(ours) - len(different), "first_divergence": first}


def _verdicts(events: Sequence[Event]) -> dict[tuple[int, int, int], str]:
    """Return the kind of each access by pass, layer and expert."""
    return {(event.step_pass, event.layer, event.expert): event.kind for event in events if event.kind in VERDICTS}


def run_document(run: Measurement, label: str) -> dict[str, Any]:
    """Return an entry of `runs`; `label` is the slow tier's."""
    ran = {"measured": run.measured, "simulated": run.simulated, "closure": run.closure}
    config = run.cell.config.model_dump(mode="json", exclude={"platform"})
    return {
        "config": config,
        "slow_tier": label,
        "throttle_bytes_per_s": run.cell.throttle,
        "repeat": run.repeat,
        "decisions": run.measured.decisions,
        "gate_ms": run.measured.gate_ns / MS,
        "engine_ms": run.measured.engine_ns / MS,
        **{name: figures(each) for name, each in ran.items()},
        "warnings": list(run.warnings),
        "agreement": agreement(run.measured.result.events, run.simulated.result.events),
        "per_token": {f"{name}_ms": [round(ns / MS, 4) for ns in each.pass_ns.tolist()] for name, each in ran.items()},
    }


def summary(runs: Sequence[Measurement]) -> dict[str, Any]:
    """Return errors of TPOT over throttled and raw runs, of closure over all runs, and the spread of repeats."""
    throttled = [run for run in runs if run.cell.throttle is not None]
    raw = [run for run in runs if run.cell.throttle is None]
    closure = [abs(_error(run, run.closure)) for run in runs]
    return {
        "throttled": _errors(throttled),
        "raw": _errors(raw),
        "closure": {"mape": fmean(closure), "worst": max(closure)} if closure else None,
        "repeat_spread": repeat_spread(runs),
        "gate_ms": _gates(runs),
    }


def _gates(runs: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean time of decisions at a gate, by the engine that decided."""
    by_way = defaultdict[str, list[float]](list)
    for run in runs:
        by_way[run.measured.decisions].append(run.measured.gate_ns / MS)
    return {way: fmean(each) for way, each in sorted(by_way.items())}


def _errors(runs: Sequence[Measurement]) -> dict[str, Any]:
    """Return simulated / measured - 1 of TPOT.

    `r` is Pearson's over the runs, None if undefined.
    """
    if not runs:
        return {"runs": 0, "bias": None, "mape": None, "worst": None, "r": None, "repeat_spread": None}
    errors = [_error(run, run.simulated) for run in runs]
    pairs = np.array([(_tpot(run.measured), _tpot(run.simulated)) for run in runs])
    varied = len(runs) > 2 and (pairs.std(0) > 0).all()
    return {
        "runs": len(runs),
        "bias": fmean(errors),
        "mape": fmean(map(abs, errors)),
        "worst": max(errors, key=abs),
        "r": float(np.corrcoef(pairs.T)[0, 1]) if varied else None,
        "repeat_spread": repeat_spread(runs),
    }


def repeat_spread(runs: Sequence[Measurement]) -> float | None:
    """Return the median over cells of (largest - smallest) / mean of the measured TPOT; None without a repeat."""
    by_cell = defaultdict[Cell, list[float]](list)
    for run in runs:
        by_cell[run.cell].append(_tpot(run.measured))
    apart = [(max(each) - min(each)) / fmean(each) for each in by_cell.values() if len(each) > 1]
    return median(apart) if apart else None


def _error(run: Measurement, simulated: Ran) -> float:
    return _tpot(simulated) / _tpot(run.measured) - 1


def _tpot(ran: Ran) -> float:
    """Return the milliseconds per decoded token; per pass where nothing is decoded."""
    found = figures(ran)["tpot_ms"]
    return float(found) if found is not None else float(ran.pass_ns.mean() / MS)


def rows(runs: Sequence[Measurement]) -> list[dict[str, object]]:
    """Return a row per run."""
    return [_row(run) for run in runs]


def _row(run: Measurement) -> dict[str, object]:
    config, said = run.cell.config, agreement(run.measured.result.events, run.simulated.result.events)
    times = {
        "measured ms": _tpot(run.measured),
        "simulated ms": _tpot(run.simulated),
    }
    return {
        "eviction": config.eviction,
        "prefetch": config.prefetch,
        "decided": run.measured.decisions,
        "capacity": config.capacity,
        "link": "raw" if run.cell.throttle is None else f"{run.cell.throttle / MB:g} MB/s",
        **times,
        "error": f"{_error(run, run.simulated):+.1%}",
        "closure": f"{_error(run, run.closure):+.2%}",
        "alike": f"{said['same']}/{said['accesses']}",
    }


def summary_lines(runs: Sequence[Measurement]) -> list[str]:
    """Return the errors of replays in words."""
    found = summary(runs)
    lines = []
    for kind in ("throttled", "raw"):
        of = found[kind]
        if of["runs"]:
            spread = "" if of["repeat_spread"] is None else f"; repeats differ by {of['repeat_spread']:.1%} (median)"
            errors = f"bias {of['bias']:+.1%}, mean |error| {of['mape']:.1%}, worst {of['worst']:+.1%}"
            lines.append(f"{kind}: {of['runs']} runs, TPOT of the replay: {errors}{spread}")
    closure = found["closure"]
    lines.append(
        f"closure, measured durations replayed: mean |error| {closure['mape']:.2%}, worst {closure['worst']:.2%}"
    )
    unsteady = sorted({each.partition(":")[0] for run in runs for each in run.warnings})
    if unsteady:
        some = sum(bool(run.warnings) for run in runs)
        lines.append(f"warning: around {some} of {len(runs)} runs a calibration was not steady: {', '.join(unsteady)}")
    spent = ", ".join(f"{way} {spent:.2f} ms" for way, spent in found["gate_ms"].items())
    lines.append(f"decisions at a gate: {spent}")
    return lines
