"""Fit the link of a platform: to logged waits for bytes, or to times per token alone (a line over missed bytes).

A run with a per-token log gives up to four observations: its tokens, sorted by bytes read, in four parts with
their mean waits. This separates the start of a transfer from its rate, within a run and between
runs of different budgets. Engines that do not overlap reads with compute were measured to read at another rate (why is
not known: their cores sleep meanwhile); runs of both kinds share the start and the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple, TypeVar

import numpy as np

from moereplay.calibration.prediction import as_run, compute_ms, first_read, loading_ms, waiting_ms
from moereplay.calibration.runs import Run
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Roofline

PARTS, FEWEST_TOKENS = 4, 40
#: If the bytes of the first and last part differ by a smaller factor, the log is one observation.
UNLIKE = 1.2
#: First reads must differ by this factor to separate a constant start from one per MiB.
OTHER_READS = 1.5
LEAST_START = 1_000.0  #: nanoseconds; a shorter start counts as 0
#: The rate limit of a lane, and another rate without overlap, are kept only if they count by more than this share.
FELT = 0.02
START_NS = 200_000.0
STARTS_NS_PER_MIB = (20_000.0, 400_000.0)
#: Weight of the expected difference of two rates relative to a run's error: 30 % against 7 %.
TIE = 0.25


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
    """Fit rates, start and lanes of the link. Return the base with them, and the figures."""
    by_matrix = any(wait.run.sizes.matrices_stated for wait in waits)
    base = _reading(base, by_matrix)
    names, starts = _free(waits, base), _starts(waits)

    def fitted(some: Sequence[Waits]) -> dict[str, float]:
        place = _least_place(some, base, names, starts)
        if len(some) == len(waits):
            starts[:] = [place]  # fits without one run start here
        return _kept(place, some)

    figures = jackknifed(waits, fitted)
    return with_link(base, {name: figure.value for name, figure in figures.items()}), figures


def _reading(base: Platform, by_matrix: bool) -> Platform:
    """Return the base with a link of one read per expert, or of one per matrix, without latency and sizes."""
    known = {"latency_ns": 0, "by_size": (), "reads": 1, "first_piece": 1.0, "by_matrix": by_matrix}
    return base.model_copy(update={"links": (base.links[0].model_copy(update=known), *base.links[1:])})


def with_link(base: Platform, figures: Mapping[str, float], serial: bool = False) -> Platform:
    """Return the platform with the given link values, or with those of an engine without overlap."""
    rate = figures.get("serial_bytes_per_s") if serial else None
    known: dict[str, object] = {"bytes_per_s": rate or figures["bytes_per_s"]}
    known |= {name: round(figures.get(name, 0)) for name in ("start_ns", "start_ns_per_mib")}
    known |= {"lane_bytes_per_s": figures.get("lane_bytes_per_s")}
    return base.model_copy(update={"links": (base.links[0].model_copy(update=known), *base.links[1:])})


def _guess(waits: Sequence[Waits]) -> float:
    """Return bytes per second if transmission alone explained the waits."""
    rates = [wait.run.missed_bytes.mean() / (wait.run.mean(_column(wait.run)) or 1) for wait in waits]
    return float(np.median(rates)) * 1000


def _free(waits: Sequence[Waits], base: Platform) -> list[str]:
    """Return the figures that these runs can identify."""
    first = [first_read(base.links[0], wait.run.sizes) for wait in waits]
    lanes, modes = {wait.run.lanes or 1 for wait in waits}, {wait.run.serial for wait in waits}
    return [
        "bytes_per_s",
        "start_ns_per_mib",
        *(["start_ns"] if max(first) > OTHER_READS * min(first) else []),
        *(["lane_bytes_per_s"] if len(lanes) > 1 else []),
        *(["serial_bytes_per_s"] if len(modes) > 1 else []),
    ]


def _starts(waits: Sequence[Waits]) -> list[dict[str, float]]:
    """Return start points of the search."""
    guess, lanes = _guess(waits), min(wait.run.lanes or 1 for wait in waits)
    rates = {"bytes_per_s": guess, "serial_bytes_per_s": guess, "lane_bytes_per_s": guess / lanes, "start_ns": START_NS}
    return [rates | {"start_ns_per_mib": start} for start in STARTS_NS_PER_MIB]


def _least_place(
    waits: Sequence[Waits], base: Platform, names: Sequence[str], starts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    def residuals(place: np.ndarray) -> np.ndarray:
        figures = dict(zip(names, np.exp(place).tolist(), strict=True))
        machines = {serial: with_link(base, figures, serial) for serial in (False, True)}
        errors = [robust(wait.errors(machines[wait.run.serial])) / sqrt(len(wait.parts)) for wait in waits]
        tie = TIE * np.log(figures.get("serial_bytes_per_s", figures["bytes_per_s"]) / figures["bytes_per_s"])
        return np.concatenate([*errors, [tie]])

    found = [_descended(residuals, [start[name] for name in names]) for start in starts]
    _, place = min(found, key=lambda each: each[0])
    return dict(zip(names, place, strict=True))


def _descended(residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> tuple[float, list[float]]:
    """Return the loss and the place of a local minimum; all numbers stay positive."""
    from scipy.optimize import least_squares

    reach = (np.log(start) - REACH, np.log(start) + REACH)
    found = least_squares(residuals, np.log(start), bounds=reach, diff_step=1e-4, xtol=1e-10, ftol=1e-12)
    return float(found.cost), np.exp(found.x).tolist()


def _kept(found: dict[str, float], waits: Sequence[Waits]) -> dict[str, float]:
    """Drop a negligible start, a rate limit of lanes that slows no run, and a rate without overlap that is the same."""
    found = dict(found)
    for name in ("start_ns", "start_ns_per_mib"):
        if name in found and found[name] < LEAST_START:
            found[name] = 0.0
    rates = [found[name] for name in ("bytes_per_s", "serial_bytes_per_s") if name in found]
    if lane := found.get("lane_bytes_per_s"):
        fewest = min(wait.run.lanes or 1 for wait in waits)
        if lane * fewest > (1 - FELT) * max(rates):
            del found["lane_bytes_per_s"]
    if len(rates) > 1 and abs(rates[1] / rates[0] - 1) < FELT:
        del found["serial_bytes_per_s"]
    return found


# -- figures and their spread

Item = TypeVar("Item")


class Figure(NamedTuple):
    """A fitted value, its half range under leave-one-run-out (None with one run), and the number of runs."""

    value: float
    spread: float | None
    n: int


def jackknifed(items: Sequence[Item], fitted: Callable[[Sequence[Item]], dict[str, float]]) -> dict[str, Figure]:
    """Fit all items, and each subset without one item for the spread."""
    whole = fitted(items)
    without = [fitted([*items[:at], *items[at + 1 :]]) for at in range(len(items))] if len(items) > 1 else []
    return {name: Figure(value, _half_range(name, without), len(items)) for name, value in whole.items()}


def _half_range(name: str, fits: Sequence[dict[str, float]]) -> float | None:
    values = [fit[name] for fit in fits if name in fit]
    return (max(values) - min(values)) / 2 if values else None


# -- search

REACH = 7.0  #: how far the logarithm of a figure may move from its start
#: Larger errors count linearly, so that a run of a machine in another state does not dominate the fit.
USUAL_ERROR = 0.1


def robust(errors: np.ndarray) -> np.ndarray:
    """Return residuals whose squares are twice the Huber loss of errors, which are logarithms of ratios."""
    sizes = np.abs(errors)
    loss = np.where(sizes < USUAL_ERROR, sizes**2, 2 * USUAL_ERROR * (sizes - USUAL_ERROR / 2))
    return np.sign(errors) * np.sqrt(loss)


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

    base = _reading(base, False)

    def fitted(some: Sequence[Run]) -> dict[str, float]:
        _, place = min(_descended(lambda place: _line_errors(some, base, place), start) for start in GUESSES)
        return dict(zip(("memory_bytes_per_s", "bytes_per_s"), place, strict=True))

    figures = jackknifed(runs, fitted) if len(runs) > FEWEST else _unsure(fitted(runs), len(runs))
    return _platform(base, [figure.value for figure in figures.values()]), figures


def _unsure(values: dict[str, float], n: int) -> dict[str, Figure]:
    return {name: Figure(value, None, n) for name, value in values.items()}


def _platform(base: Platform, place: Sequence[float]) -> Platform:
    compute = Roofline(flops=1e18, memory_bytes_per_s=place[0])
    linked = with_link(base, {"bytes_per_s": place[1]})
    return linked.model_copy(update={"compute": compute, "overlap": "none"})


def _line_errors(runs: Sequence[Run], base: Platform, place: np.ndarray) -> np.ndarray:
    platform = _platform(base, np.exp(place).tolist())
    return robust(np.array([np.log(token_ms(platform, run) / time_of(run)) for run in runs]))


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
