"""Kernels of `least_time`: a walk over the steps from where a window begins, which raises the limits of their ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.optimum import ACCESSES, HITS, look_up
from moereplay.simulator.jit.calls import compiled


class Steps(NamedTuple):
    """What compute and links take, S steps; nothing contends."""

    dense_ns: np.ndarray  #: (S,) int64, before the gate
    expert_ns: np.ndarray  #: (S,) int64, all experts of the step
    last_ns: np.ndarray  #: (S,) int64: of the expert that arrived last, at least
    carried_ns: np.ndarray  #: (n + 1,) int64: until the links have carried 0, 1, ... n experts


def _first_uses(demands, first, cut, coming):
    """When each expert is used first from a step on; `coming` has NEVER where it is not."""
    for step in range(len(demands.offsets) - 2, first - 1, -1):
        base = step % cut.layers * cut.experts
        for at in range(demands.offsets[step], demands.offsets[step + 1]):
            coming[base + np.int64(demands.expert[at])] = at


def _window(demands, origin, first, last, cut, bits, pools, steps, base, counts, ends):
    """Raise the limits `ends` of steps [first, last), counted from `origin`, by what is fetched from `first` on.

    `base`: the limit at which the window begins, and whether nothing can be fetched before its first gate; `counts` are
    those of `optimum`.
    """
    begun, now = base[0], base[0]
    if base[1]:
        begun += steps.dense_ns[first]
    for step in range(first, last):
        layer = step % cut.layers
        pool, start = layer if cut.per_layer else 0, layer * cut.experts
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together, missed = stop - begin if cut.atomic else 1, counts[ACCESSES] - counts[HITS]
        for group in range(begin, stop, max(1, together)):
            look_up(demands, group, group + together, pool, start, bits, False, pools, counts)
        now += steps.dense_ns[step] + steps.expert_ns[step]
        if counts[ACCESSES] - counts[HITS] > missed:
            now = max(now, begun + steps.carried_ns[counts[ACCESSES] - counts[HITS]] + steps.last_ns[step])
        now = max(now, ends[step - origin])
        ends[step - origin] = now


WINDOW, FIRST_USES = compiled(_window), compiled(_first_uses)
