"""Run configurations for real and replay them: interleaved, repeated, with calibrations before and after.

A calibration is a run under the same policies and throttle on other tokens, at one capacity. The calibrations around a
repeat are fitted together; the run is compared with a replay on that platform.
"""

from __future__ import annotations

import datetime
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import Costs
from moereplay.policies.grammar import Chosen
from moereplay.results.checks import side_of
from moereplay.results.result import Event
from moereplay.simulator.calibration import Calibration
from moereplay.simulator.config import KINDS, ReplayConfig
from moereplay.simulator.platforms import as_toml, sealed
from moereplay.simulator.replay import plan as replay_plan
from moereplay.tracegen.offload.bench import Bench, Ran, replayed
from moereplay.tracegen.offload.calibration import Fitted, fit
from moereplay.tracegen.offload.durations import Durations
from moereplay.traces.schema import Trace
from moereplay.traces.texts import counted
from moereplay.traces.units import MB, MS


class Cell(NamedTuple):
    """A configuration that is measured."""

    config: ReplayConfig
    throttle: float | None  #: bytes per second


class Kind(NamedTuple):
    """Configurations that share a calibration."""

    policies: tuple[str, ...]
    throttle: float | None


class Measurement(NamedTuple):
    """One real run with its two replays: on the calibrated platform, and with the run's own durations."""

    cell: Cell
    repeat: int
    measured: Ran
    simulated: Ran
    closure: Ran
    warnings: tuple[str, ...] = ()  #: of the calibration


@dataclass(frozen=True)
class Plan:
    """Cells, how often, on which tokens; `seed` decides the order."""

    cells: Sequence[Cell]
    repeats: int
    trace: Trace
    calibration: Trace  #: other tokens
    device: str
    seed: int = 0

    @property
    def runs(self) -> int:
        """Real runs, calibrations among them."""
        return self.repeats * len(self.cells) + (self.repeats + 1) * len(self.kinds)

    @property
    def kinds(self) -> dict[Kind, Cell]:
        """The kinds to calibrate, each at its middle capacity."""
        by_kind: dict[Kind, list[Cell]] = {}
        for cell in self.cells:
            by_kind.setdefault(kind_of(cell), []).append(cell)
        return {kind: cells[len(cells) // 2] for kind, cells in by_kind.items()}


def kind_of(cell: Cell) -> Kind:
    """Return policies and throttle without the capacity."""
    return Kind(tuple(getattr(cell.config, kind) for kind in KINDS), cell.throttle)


def measure(bench: Bench, plan: Plan, folder: Path, done: Callable[[], None]) -> Iterator[Measurement]:
    """Run every cell as often as planned and yield in the order of the runs. Platforms are written into `folder`.

    `done` is called after each real run. Raises ConfigError where the slow tier fails.
    """
    before = _calibrated(bench, plan, done)
    settled = {cell: _settled(plan, cell, before[kind_of(cell)], folder) for cell in plan.cells}
    order = random.Random(plan.seed)
    for repeat in range(plan.repeats):
        cells = order.sample(list(plan.cells), len(plan.cells))
        runs = []
        for cell in cells:
            runs.append((cell, *bench.measured(plan.trace, settled[cell], cell.throttle)))
            done()
        after = _calibrated(bench, plan, done)
        fits = {kind: _fitted(plan, kind, [before[kind], after[kind]]) for kind in plan.kinds}
        platforms = {kind: _written(fitted, folder, repeat, at) for at, (kind, fitted) in enumerate(fits.items())}
        before = after
        for cell, ran, durations in runs:
            kind, config = kind_of(cell), settled[cell]
            simulated = replayed(plan.trace, _on(config, platforms[kind]))
            closure = replayed(plan.trace, config, durations)
            yield Measurement(cell._replace(config=config), repeat, ran, simulated, closure, fits[kind].warnings)


def _calibrated(bench: Bench, plan: Plan, done: Callable[[], None]) -> dict[Kind, Durations]:
    found: dict[Kind, Durations] = {}
    for kind, cell in plan.kinds.items():
        _, found[kind] = bench.measured(plan.calibration, cell.config, cell.throttle)
        done()
    return found


def _settled(plan: Plan, cell: Cell, before: Durations, folder: Path) -> ReplayConfig:
    """Fix parameters that policies take from the platform, with this machine's prices, for all runs."""
    chosen = cell.config.policy_set()
    open_ = [kind for kind in KINDS if _is_open(getattr(chosen, kind))]
    if not open_:
        return cell.config
    path = folder / "platform-before.toml"
    path.write_text(as_toml(_fitted(plan, kind_of(cell), [before]).platform), "utf-8")
    ready = replay_plan(plan.trace, _on(cell.config, path))
    fixed = ready.chosen.priced(ready.spec(False).times)
    return cell.config.model_copy(update={kind: getattr(fixed, kind).text() for kind in open_})


def _is_open(chosen: Chosen) -> bool:
    return chosen.policy.priced(chosen.params, Costs(1, 1, 1)) != chosen.params


def _fitted(plan: Plan, kind: Kind, runs: Sequence[Durations]) -> Fitted:
    found = fit(runs, _about(plan, kind), kind.throttle)
    if found.platform.cpu is not None or not _uses_cpu(plan.kinds[kind].config):
        return found
    said = "cpu: it has computed no miss, and is priced as the accelerator; calibrate with more tokens"
    platform = found.platform.model_copy(update={"cpu": found.platform.compute})
    return found._replace(platform=sealed(platform), warnings=(*found.warnings, said))


def _uses_cpu(config: ReplayConfig) -> bool:
    miss = config.policy_set().miss
    return miss.policy.uses_cpu(miss.params)


def _on(config: ReplayConfig, platform: Path) -> ReplayConfig:
    return config.model_copy(update={"platform": str(platform)})


def _written(fitted: Fitted, folder: Path, repeat: int, at: int) -> Path:
    path = folder / f"platform-{repeat}-{at}.toml"
    path.write_text(as_toml(fitted.platform), "utf-8")
    return path


def _about(plan: Plan, kind: Kind) -> Calibration:
    load = os.getloadavg()[0]
    method = f"moereplay measure: runs under {', '.join(kind.policies)} before and after; load {load:.1f}"
    return Calibration(device=plan.device, method=method, date=datetime.date.today().isoformat(), cells=2)


# -- Compare measured with simulated runs: figures of a run, agreement of its accesses, and the errors of all runs.

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
            lines.append(f"{kind}: {counted(of['runs'], 'run')}, TPOT of the replay: {errors}{spread}")
    closure = found["closure"]
    lines.append(
        f"closure, measured durations replayed: mean |error| {closure['mape']:.2%}, worst {closure['worst']:.2%}"
    )
    unsteady = sorted({warning.partition(":")[0] for run in runs for warning in run.warnings})
    if unsteady:
        some = sum(bool(run.warnings) for run in runs)
        lines.append(f"warning: around {some} of {len(runs)} runs a calibration was not steady: {', '.join(unsteady)}")
    spent = ", ".join(f"{way} {spent:.2f} ms" for way, spent in found["gate_ms"].items())
    lines.append(f"decisions at a gate: {spent}")
    return lines
