"""Two figures from runs that published a time per token and nothing of what it is made of: a line over missed bytes.

What a token takes without a miss is read as bytes of weights at a rate, what misses add as bytes of the link. Whether
both overlap such runs do not say: here nothing does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moereplay.calibration.figures import Figure, jackknifed
from moereplay.calibration.link_fit import with_link
from moereplay.calibration.prediction import as_run, compute_ms, loading_ms, waiting_ms
from moereplay.calibration.runs import Run
from moereplay.calibration.search import huber, least
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Roofline

FEWEST = 2  #: runs of different bytes
GUESSES = ((1e10, 2e9), (1e11, 1e10), (1e12, 2e10))


def fit_line(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """The base with a rate of compute and one of the link. Raises ConfigError if the runs cannot tell them apart."""
    if len({round(float(run.missed_bytes.mean()), -3) for run in runs}) < FEWEST:
        raise ConfigError(
            "no run to fit that reads experts logs compute_ms with stall_ms (or io_ms, by --serial), and all read as "
            "much per token; name runs of several memory budgets"
        )

    def fitted(some: Sequence[Run]) -> dict[str, float]:
        place = least(lambda place: _loss(some, base, place), GUESSES)
        return dict(zip(("memory_bytes_per_s", "bytes_per_s"), place, strict=True))

    figures = jackknifed(runs, fitted) if len(runs) > FEWEST else _unsure(fitted(runs), len(runs))
    return _platform(base, [figure.value for figure in figures.values()]), figures


def _unsure(values: dict[str, float], n: int) -> dict[str, Figure]:
    return {name: Figure(value, None, n) for name, value in values.items()}


def _platform(base: Platform, place: Sequence[float]) -> Platform:
    compute = Roofline(flops=1e18, memory_bytes_per_s=place[0])
    linked = with_link(base, {"bytes_per_s": place[1], "start_ns": 0})
    return linked.model_copy(update={"compute": compute, "overlap": "none"})


def _loss(runs: Sequence[Run], base: Platform, place: Sequence[float]) -> float:
    platform = _platform(base, place)
    return huber(np.array([np.log(token_ms(platform, run) / time_of(run)) for run in runs]))


def token_ms(platform: Platform, run: Run) -> float:
    """Milliseconds that a run's mean token takes on a platform."""
    machine = as_run(platform, run)
    return compute_ms(machine, run) + float((waiting_ms(machine, run) + loading_ms(machine, run)).mean())


def time_of(run: Run) -> float:
    """Milliseconds that the run's mean token took, as published or as logged."""
    cell, speed = run.cell, run.cell.amount("tok_s")
    found = cell.amount("tpot_ms") or cell.amount("tpot_median_ms") or (1000 / speed if speed else run.mean("wall_ms"))
    assert found, "a run without a time is none"
    return found
