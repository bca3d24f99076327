"""The fewest misses if routing may choose: a limit that no admissible choice undercuts, and what one of them reaches.

Where any eviction and any admissible routing are free to know the future, the fewest misses lie between both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.simulator.bounds import RELAXED, Bound
from moereplay.simulator.curves.stream import resets
from moereplay.simulator.limits.choices import Choices, Freedom, choices, sharpened
from moereplay.simulator.limits.relaxation import Pools, Relaxation, unit_of
from moereplay.simulator.limits.strategy import Strategy
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace


class Bracket(NamedTuple):
    """Misses: nothing has fewer than `at_least`, and some way has `at_most`."""

    at_least: int
    at_most: int


def fewest_misses(trace: Trace, bound: Bound, free: Freedom, recorded: int) -> Bracket:
    """In the pools of a relaxed bound, which has `recorded` misses by the recorded routing: one of the ways.

    Raises TraceError.
    """
    assert bound.admission == RELAXED
    plan, experts = schedule(trace, bound.passes), trace.geometry.experts
    rules = choices(trace, bound.passes, free)
    pools = _pools(trace, bound, plan, rules)
    warm = [layer * experts + expert for layer, expert in bound.warm]
    rows, every = np.append(plan.start, plan.stop[-1]), trace.geometry.layers * experts
    strategy = Strategy(rules, pools, rows, every, warm)
    reached = [min(strategy.soonest(), recorded)]
    relaxation = Relaxation(sharpened(rules), pools, every, warm)
    for prices, solved in relaxation.search(reached):
        reached[0] = min(reached[0], strategy.priced(prices, solved))
    return Bracket(relaxation.limit, reached[0])


def _pools(trace: Trace, bound: Bound, plan: Passes, rules: Choices) -> Pools:
    layers = trace.geometry.layers
    starts = np.repeat(np.cumsum(resets(plan, bound.reset)), layers).astype(np.int64)
    slots = np.array(bound.slots, np.int64)
    return Pools(slots, starts, layers, layers if len(slots) > 1 else 1, unit_of(rules))
