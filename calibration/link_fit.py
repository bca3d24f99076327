"""The link's figures, from how long runs waited for how many bytes.

A run that logged its tokens gives up to four observations: its tokens in parts by bytes read, each with its mean wait.
So the start of a transfer is told apart from its rate within one run, and between runs of different budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moereplay.calibration.figures import Figure, jackknifed
from moereplay.calibration.prediction import as_run, waiting_ms
from moereplay.calibration.runs import Run
from moereplay.calibration.search import huber, least
from moereplay.simulator.platform import Platform

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
