"""A minimum of a function of few positive numbers, by trying steps of fixed ratios: deterministic, no derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import exp

import numpy as np

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
