"""Fit the link of a platform: to logged waits for bytes, or to times per token alone (a line over missed bytes).

A run with a per-token log gives up to four observations: its tokens, sorted by bytes read, in four parts with
their mean waits. This separates the start of a transfer from its rate, within a run and between
runs of different budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp
from typing import NamedTuple, TypeVar

import numpy as np

from moereplay.calibration.prediction import as_run, compute_ms, loading_ms, waiting_ms
from moereplay.calibration.runs import Run
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Roofline

PARTS, FEWEST_TOKENS = 4, 40
#: If the bytes of the first and last part differ by a smaller factor, the log is one observation.
UNLIKE = 1.2
LEAST_START = 1_000.0  #: nanoseconds; a shorter start counts as 0
#: The rate limit of a lane is kept only if it slows a run by more than this share.
FELT = 0.02
STARTS_NS = (20_000.0, 400_000.0, 2_000_000.0)


@dataclass(frozen=True)
class Waits:
    """Observations of one run: the mean wait in ms of each part of its tokens."""

    run: Run
    parts: tuple[np.ndarray, ...]  #: indices of tokens
    waited_ms: tuple[float, ...]

    def errors(self, platform: Platform) -> np.ndarray:
        """Return log(predicted / measured wait) of each part."""
        each = waiting_ms(as_run(platform, self.run), self.run)
        predicted = np.array([each[part].mean() for part in self.parts])
        return np.log(np.maximum(predicted, 1e-9) / np.array(self.waited_ms))


def waits_of(runs: Sequence[Run]) -> list[Waits]:
    """Return the observations of runs that read bytes and logged their waits."""
    waited = [run for run in runs if run.mean(_column(run)) and run.missed_bytes.any()]
    return [_waits(run) for run in waited]


def _column(run: Run) -> str:
    """Name the column of a run's waits."""
    return "io_ms" if run.serial else "stall_ms"


def _waits(run: Run) -> Waits:
    rows = getattr(run.series, _column(run), None)
    if rows is None or len(run.missed_bytes) != len(rows):
        return Waits(run, (np.arange(len(run.missed_bytes)),), (run.mean(_column(run)) or 0,))
    parts = _parts(run.missed_bytes)
    means = [float(rows[part].mean()) for part in parts]
    kept = [(part, mean) for part, mean in zip(parts, means, strict=True) if mean > 0]
    return Waits(run, tuple(part for part, _ in kept), tuple(mean for _, mean in kept))


def _parts(missed: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(missed, kind="stable")
    parts = np.array_split(order, PARTS)
    if len(missed) < FEWEST_TOKENS or missed[parts[-1]].mean() < UNLIKE * missed[parts[0]].mean():
        return [order]
    return parts


def fit_link(waits: Sequence[Waits], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """Fit rate, start and lanes of the link. Return the base with them, and the figures."""
    starts = _starts(waits)

    def fitted(some: Sequence[Waits]) -> dict[str, float]:
        place = _least_place(some, base, starts)
        if len(some) == len(waits):
            starts[:] = [place]  # fits without one run start here
        return _kept(_named(place), some)

    figures = jackknifed(waits, fitted)
    return with_link(base, {name: figure.value for name, figure in figures.items()}), figures


def with_link(base: Platform, figures: dict[str, float]) -> Platform:
    """Return the platform with these figures of its link; they replace the latency of the base."""
    known = {"bytes_per_s": figures["bytes_per_s"], "start_ns": round(figures["start_ns"]), "latency_ns": 0}
    known |= {"lane_bytes_per_s": figures.get("lane_bytes_per_s"), "by_size": (), "reads": 1}
    return base.model_copy(update={"links": (base.links[0].model_copy(update=known), *base.links[1:])})


def _guess(waits: Sequence[Waits]) -> float:
    """Return bytes per second if transmission alone explained the waits."""
    rates = [wait.run.missed_bytes.mean() / (wait.run.mean(_column(wait.run)) or 1) for wait in waits]
    return float(np.median(rates)) * 1000


def _starts(waits: Sequence[Waits]) -> list[tuple[float, ...]]:
    """Return start points of the search: rate, start, and the rate of a lane if runs differ in lanes."""
    guess, lanes = _guess(waits), {wait.run.lanes or 1 for wait in waits}
    lane = (guess / min(lanes),) if len(lanes) > 1 else ()  # without a difference the lane's rate cannot be identified
    return [(guess, start, *lane) for start in STARTS_NS]


def _least_place(waits: Sequence[Waits], base: Platform, starts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    def loss(place: Sequence[float]) -> float:
        machine = with_link(base, _named(place))
        return sum(huber(wait.errors(machine)) / len(wait.parts) for wait in waits)

    return least(loss, starts)


def _named(place: Sequence[float]) -> dict[str, float]:
    return dict(zip(("bytes_per_s", "start_ns", "lane_bytes_per_s"), place, strict=False))


def _kept(found: dict[str, float], waits: Sequence[Waits]) -> dict[str, float]:
    """Drop a negligible start, and a rate limit of lanes that slows no run."""
    if found["start_ns"] < LEAST_START:
        found["start_ns"] = 0.0
    if lane := found.get("lane_bytes_per_s"):
        fewest = min(wait.run.lanes or 1 for wait in waits)
        if lane * fewest > (1 - FELT) * found["bytes_per_s"]:
            del found["lane_bytes_per_s"]
    return found


# -- figures and their spread

Item = TypeVar("Item")


class Figure(NamedTuple):
    """A fitted value, its half range under leave-one-run-out (None with one run), and the number of runs."""

    value: float
    spread: float | None
    n: int


def jackknifed(
    items: Sequence[Item], fitted: Callable[[Sequence[Item]], dict[str, float]], n: int | None = None
) -> dict[str, Figure]:
    """Fit all items, and each subset without one item for the spread."""
    whole = fitted(items)
    without = [fitted([*items[:at], *items[at + 1 :]]) for at in range(len(items))] if len(items) > 1 else []
    return {name: Figure(value, _half_range(name, without), n or len(items)) for name, value in whole.items()}


def _half_range(name: str, fits: Sequence[dict[str, float]]) -> float | None:
    values = [fit[name] for fit in fits if name in fit]
    return (max(values) - min(values)) / 2 if values else None


# -- search: a deterministic descent over few positive numbers, by steps of fixed ratios, without derivatives

#: Step sizes of the logarithms; each is used until no step improves the loss.
STEPS = (0.5, 0.15, 0.05, 0.015, 0.005, 0.0015)
MOST_MOVES = 100  #: per step size
#: Larger errors count linearly, so that a run of a machine in another state does not dominate the fit.
USUAL_ERROR = 0.1

Loss = Callable[[Sequence[float]], float]


def huber(errors: np.ndarray) -> float:
    """Return the Huber loss of errors, which are logarithms of ratios."""
    sizes = np.abs(errors)
    return float(np.where(sizes < USUAL_ERROR, sizes**2 / 2, USUAL_ERROR * (sizes - USUAL_ERROR / 2)).sum())


def least(loss: Loss, starts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the best local minimum reached from the start points; all numbers stay positive."""
    reached = [_descended(loss, start) for start in starts]
    return min(reached, key=loss)


def _descended(loss: Loss, start: Sequence[float]) -> tuple[float, ...]:
    place, best = tuple(start), loss(start)
    for step in STEPS:
        for _ in range(MOST_MOVES):
            nearby = [(loss(moved), moved) for moved in _moves(place, step)]
            lowest, moved = min(nearby)
            if lowest >= best - 1e-12:
                break
            place, best = moved, lowest
    return place


def _moves(place: tuple[float, ...], step: float) -> list[tuple[float, ...]]:
    """Move every number up, down or not, in all combinations: rate and start are correlated."""
    ratios = {-1: exp(-step), 0: 1.0, 1: exp(step)}
    ways = [way for way in product(ratios, repeat=len(place)) if any(way)]
    return [tuple(number * ratios[to] for number, to in zip(place, way, strict=True)) for way in ways]


# -- runs that published times per token alone

FEWEST = 2  #: runs of different bytes
GUESSES = ((1e10, 2e9), (1e11, 1e10), (1e12, 2e10))


def fit_line(runs: Sequence[Run], base: Platform) -> tuple[Platform, dict[str, Figure]]:
    """Fit a compute rate and a link rate. Raises ConfigError if the runs cannot identify both."""
    if len({round(float(run.missed_bytes.mean()), -3) for run in runs}) < FEWEST:
        raise ConfigError(
            "no run that reads experts logs compute_ms with stall_ms (with --serial: io_ms), and all read the same "
            "bytes per token; pass runs of several memory budgets"
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
    """Predict the mean time per token of a run in ms."""
    machine = as_run(platform, run)
    return compute_ms(machine, run) + float((waiting_ms(machine, run) + loading_ms(machine, run)).mean())


def time_of(run: Run) -> float:
    """Return the measured mean time per token in ms, as published or as logged."""
    cell, speed = run.cell, run.cell.amount("tok_s")
    found = cell.amount("tpot_ms") or cell.amount("tpot_median_ms") or (1000 / speed if speed else run.mean("wall_ms"))
    assert found, "runs without a time are refused earlier"
    return found
