"""Run configurations for real and replay them: interleaved, repeated, with calibrations before and after.

A calibration is a run under the same policies and throttle on other tokens, at one capacity. The calibrations around a
repeat are fitted together; the run is compared with a replay on that platform.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moereplay.policies.contract import Costs
from moereplay.simulator.config import KINDS, ReplayConfig
from moereplay.simulator.platform import Calibration
from moereplay.simulator.platforms import as_toml, sealed
from moereplay.simulator.replay import plan as replay_plan
from moereplay.tracegen.offload.bench import Bench, Ran, replayed
from moereplay.tracegen.offload.durations import Durations
from moereplay.tracegen.offload.fit import Fitted, fit
from moereplay.traces.schema import Trace


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
    """Fix parameters that the miss policy takes from the platform, with this machine's prices, for all runs."""
    miss = cell.config.policy_set().miss
    if miss.policy.priced(miss.params, Costs(1, 1, 1)) == miss.params:
        return cell.config
    path = folder / "platform-before.toml"
    path.write_text(as_toml(_fitted(plan, kind_of(cell), [before]).platform), "utf-8")
    ready = replay_plan(plan.trace, _on(cell.config, path))
    return cell.config.model_copy(update={"miss": ready.chosen.priced(ready.spec(False).times).miss.text()})


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
