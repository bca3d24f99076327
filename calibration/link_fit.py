"""The link's figures, from how long runs waited for how many bytes.

A run that logged its tokens gives up to four observations: its tokens in parts by bytes read, each with its mean wait.
So the start of a transfer is told apart from its rate within one run, and between runs of different budgets.
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
#: Bytes of the parts must differ by so much, or the log is one observation.
UNLIKE = 1.2
LEAST_START = 1_000.0  #: nanoseconds: below it a start is none
#: A lane's ceiling is kept only where it holds some run back by more than this share.
FELT = 0.02
STARTS_NS = (20_000.0, 400_000.0, 2_000_000.0)


@dataclass(frozen=True)
class Waits:
    """One run's observations: mean wait in milliseconds of each part of its tokens."""

    run: Run
    parts: tuple[np.ndarray, ...]  #: indices of tokens
    waited_ms: tuple[float, ...]

    def errors(self, platform: Platform) -> np.ndarray:
        """Logarithms of predicted over measured wait, each divided by the number of parts."""
        each = waiting_ms(as_run(platform, self.run), self.run)
        predicted = np.array([each[part].mean() for part in self.parts])
        return np.log(np.maximum(predicted, 1e-9) / np.array(self.waited_ms))


def waits_of(runs: Sequence[Run]) -> list[Waits]:
    """What the runs say of their link; those that read nothing, or do not say how long they waited, are left out."""
    waited = [run for run in runs if run.mean(_column(run)) and run.missed_bytes.any()]
    return [_waits(run) for run in waited]


def _column(run: Run) -> str:
    """Where a run says how long it waited."""
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
    """The base with rate, start and lanes that fit the waits best, and the figures."""
    starts = _starts(waits)

    def fitted(some: Sequence[Waits]) -> dict[str, float]:
        place = _least_place(some, base, starts)
        if len(some) == len(waits):
            starts[:] = [place]  # where fits without one run begin
        return _kept(_named(place), some)

    figures = jackknifed(waits, fitted)
    return with_link(base, {name: figure.value for name, figure in figures.items()}), figures


def with_link(base: Platform, figures: dict[str, float]) -> Platform:
    """The platform with these figures of its link; one latency takes the place of the base's."""
    known = {"bytes_per_s": figures["bytes_per_s"], "start_ns": round(figures["start_ns"]), "latency_ns": 0}
    known |= {"lane_bytes_per_s": figures.get("lane_bytes_per_s"), "by_size": (), "reads": 1}
    return base.model_copy(update={"links": (base.links[0].model_copy(update=known), *base.links[1:])})


def _guess(waits: Sequence[Waits]) -> float:
    """Bytes per second if waiting were nothing but bytes."""
    rates = [wait.run.missed_bytes.mean() / (wait.run.mean(_column(wait.run)) or 1) for wait in waits]
    return float(np.median(rates)) * 1000


def _starts(waits: Sequence[Waits]) -> list[tuple[float, ...]]:
    """Where a search begins: rate and start, and a lane's rate where runs differ in lanes."""
    guess, lanes = _guess(waits), {wait.run.lanes or 1 for wait in waits}
    lane = (guess / min(lanes),) if len(lanes) > 1 else ()  # a ceiling that nobody feels would stay where it starts
    return [(guess, start, *lane) for start in STARTS_NS]


def _least_place(waits: Sequence[Waits], base: Platform, starts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    def loss(place: Sequence[float]) -> float:
        machine = with_link(base, _named(place))
        return sum(huber(wait.errors(machine)) / len(wait.parts) for wait in waits)

    return least(loss, starts)


def _named(place: Sequence[float]) -> dict[str, float]:
    return dict(zip(("bytes_per_s", "start_ns", "lane_bytes_per_s"), place, strict=False))


def _kept(found: dict[str, float], waits: Sequence[Waits]) -> dict[str, float]:
    """Without a start that is none, and without a ceiling of lanes that no run felt."""
    if found["start_ns"] < LEAST_START:
        found["start_ns"] = 0.0
    if lane := found.get("lane_bytes_per_s"):
        fewest = min(wait.run.lanes or 1 for wait in waits)
        if lane * fewest > (1 - FELT) * found["bytes_per_s"]:
            del found["lane_bytes_per_s"]
    return found


# -- A fitted figure with how sure it is.

Item = TypeVar("Item")


class Figure(NamedTuple):
    """A price, and half the range that it has when each run is left out in turn (None with one run); `n` runs."""

    value: float
    spread: float | None
    n: int


def jackknifed(
    items: Sequence[Item], fitted: Callable[[Sequence[Item]], dict[str, float]], n: int | None = None
) -> dict[str, Figure]:
    """The figures of all items, each with its spread."""
    whole = fitted(items)
    without = [fitted([*items[:at], *items[at + 1 :]]) for at in range(len(items))] if len(items) > 1 else []
    return {name: Figure(value, _half_range(name, without), n or len(items)) for name, value in whole.items()}


def _half_range(name: str, fits: Sequence[dict[str, float]]) -> float | None:
    values = [fit[name] for fit in fits if name in fit]
    return (max(values) - min(values)) / 2 if values else None


# -- A minimum of a function of few positive numbers, by trying steps of fixed ratios: deterministic, no derivatives.

#: Steps of the logarithms, each tried until none helps.
STEPS = (0.5, 0.15, 0.05, 0.015, 0.005, 0.0015)
MOST_MOVES = 100  #: per step
#: Errors beyond this count in proportion, not squared: one run in another state must not decide.
USUAL_ERROR = 0.1

Loss = Callable[[Sequence[float]], float]


def huber(errors: np.ndarray) -> float:
    """Sum of squares of small errors, of the sizes of large ones; `errors` are logarithms of ratios."""
    sizes = np.abs(errors)
    return float(np.where(sizes < USUAL_ERROR, sizes**2 / 2, USUAL_ERROR * (sizes - USUAL_ERROR / 2)).sum())


def least(loss: Loss, starts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The best place that is reached from any of the starts; all numbers stay above 0."""
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
    """Every number up, down or left: what a rate and a start explain together lies aslant."""
    ratios = {-1: exp(-step), 0: 1.0, 1: exp(step)}
    ways = [way for way in product(ratios, repeat=len(place)) if any(way)]
    return [tuple(number * ratios[to] for number, to in zip(place, way, strict=True)) for way in ways]


# -- Two figures from runs that published a time per token and nothing of what it is made of: a line over missed bytes.

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
