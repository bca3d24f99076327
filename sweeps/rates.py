"""The largest rate of arrivals at which a configuration holds a service level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moereplay.results.result import Result, Row
from moereplay.results.serving import Holding, Level, rate_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.traces.passes import slots_of

#: Rates that are tried, per decade: neighbours differ by 1.2 %.
STEPS = 200
FARTHEST = 3 * STEPS  #: from the throughput of requests that are all there at the start, in both directions


def at_rate(config: ReplayConfig, rate: str) -> ReplayConfig:
    """Return a configuration whose requests arrive at a rate per second. Raises ConfigError without slots."""
    if slots_of(config.passes) is None:
        raise ConfigError("--find-rate requires --passes batch:N")
    return config.model_copy(update={"arrivals": f"poisson:{rate}"})


def largest_rate(replay: Callable[[ReplayConfig], Result], config: ReplayConfig, level: Level) -> Holding:
    """Search for the largest rate at which the level holds, by bisection over a geometric grid.

    Gaps scale with the inverse of the rate for a fixed seed. The level holds at the rate that is returned and not at
    the next one of the grid; at rates above it may hold again where the order of passes changes.
    """
    at_rate(config, "1")
    start = replay(config.model_copy(update={"arrivals": "all"}))
    base = _throughput(start.per_request)
    results: dict[int, Result] = {}

    def holds(step: int) -> bool:
        results[step] = replay(at_rate(config, _figure(base * 10 ** (step / STEPS))))
        return level.holds(results[step].per_request)

    if level.holds(start.per_request):
        return Holding(start, None, False, 1)
    low, high = -FARTHEST, FARTHEST
    if not holds(low):
        return Holding(results[low], None, True, 1 + len(results))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Holding(results[low], rate_of(results[low].config["arrivals"]), True, 1 + len(results))


def _throughput(rows: Sequence[Row]) -> float:
    return len(rows) * 1e9 / max(1, *(row["end_ns"] for row in rows))


def _figure(rate: float) -> str:
    """Return a rate of four digits as a setting has it."""
    return f"{float(f'{rate:.4g}')!r}"
