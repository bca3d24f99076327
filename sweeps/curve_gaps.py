"""The capacities of a curve at which a machine's times decide, replayed one by one on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moereplay.results.result import Result
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.curves.curve import Curve
from moereplay.simulator.replay import ENGINES
from moereplay.sweeps.grid import run_grid
from moereplay.traces.schema import Trace


def undecided(curve: Curve, platform: str) -> list[ReplayConfig]:
    """The replays that decide the rest of a curve, smallest capacity first."""
    left = curve.capacity_bytes[~curve.decided]
    return [curve.config.model_copy(update={"capacity": f"{capacity}B", "platform": platform}) for capacity in left]


def decide(
    trace: Trace,
    curve: Curve,
    platform: str,
    workers: int = 1,
    done: Callable[[], None] = lambda: None,
    engine: str = ENGINES[0],
) -> Curve:
    """The curve without gaps; what was undecided holds for `platform` alone. `done` is called after each replay.

    Raises ConfigError if the platform or the engine is unknown.
    """
    configs = undecided(curve, platform)
    if not configs:
        return curve
    misses = curve.layer_misses.copy()
    outcomes = run_grid(trace, configs, workers, bounded=False, done=done, engine=engine)
    for at, (result, _) in zip(np.flatnonzero(~curve.decided), outcomes, strict=True):
        misses[:, at] = _by_layer(result, len(misses))
    return replace(curve, layer_misses=misses, platform=platform, replayed=~curve.decided)


def _by_layer(result: Result, layers: int) -> np.ndarray:
    misses = np.zeros(layers, np.int64)
    for row in result.per_layer:
        misses[row["layer"]] += row["misses"]
    return misses
