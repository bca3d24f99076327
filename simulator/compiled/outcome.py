"""The result of a run, from its arrays, in the form that all engines report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moereplay.policies.contract import PolicyError
from moereplay.results.counters import COUNTERS, PHASES, queued, reported
from moereplay.results.result import Event, Row
from moereplay.simulator.compiled.counters import (
    BUCKETS,
    BY_RESET,
    CAUSES,
    DECODE,
    DECODED,
    END,
    FIRST,
    EVENT_KINDS,
    NO_FIRST,
    PASSES,
    START,
    TOKENS,
    WIDTH,
)
from moereplay.simulator.compiled.initial import SimulationState
from moereplay.simulator.compiled.state import (
    BAD_CHOICE,
    BAD_NAME,
    BAD_STAND_IN,
    BAD_VERDICT,
    BAD_VICTIM,
    BAD_WANT,
    NO_CPU,
    NO_ERROR,
    NO_HOOK,
    NO_LOGITS,
    STOPPED,
    STUCK,
    TOO_LATE,
)
from moereplay.simulator.config import PolicySet
from moereplay.simulator.errors import ConfigError, too_late
from moereplay.simulator.interface import RunSpec


class FinishedCounters:
    """Counters per layer, phase and request."""

    def __init__(self, cells: np.ndarray, lifetimes: np.ndarray, requests: list[Row]) -> None:
        """`cells` (L, 2, counters) and `lifetimes` (L, 2, buckets)."""
        self._cells, self._lifetimes, self._requests = cells, lifetimes, requests

    def totals(self, end: int) -> Row:
        """Return sums over layers and phases."""
        sums = dict(zip(COUNTERS, self._cells.sum((0, 1)).tolist(), strict=True))
        return sums | {"time_ns": end, "lifetime": self._lifetimes.sum((0, 1)).tolist()}

    def per_layer(self) -> list[Row]:
        """Return a row per layer and phase; phases without steps are omitted."""
        layers, phases = (indices.tolist() for indices in np.nonzero(self._cells.any(2)))
        cells, lifetimes = (counts[layers, phases].tolist() for counts in (self._cells, self._lifetimes))
        return [
            {"layer": layer, "phase": PHASES[phase], **reported(counts, "layer"), "lifetime": lifetime}
            for layer, phase, counts, lifetime in zip(layers, phases, cells, lifetimes, strict=True)
        ]

    def per_request(self) -> list[Row]:
        """Return a row per request in run order."""
        return self._requests


def counters_of(state: SimulationState, spec: RunSpec) -> FinishedCounters:
    """Return the counters of a finished run."""
    layers = int(state["layers"])
    cells = state.arrays["cells"].reshape(layers, len(PHASES), WIDTH)
    lifetimes = state.arrays["lifetimes"].reshape(layers, len(PHASES), BUCKETS)
    return FinishedCounters(cells, lifetimes, _requests(state, spec))


def _requests(state: SimulationState, spec: RunSpec) -> list[Row]:
    columns = (state.arrays[name].tolist() for name in ("requests", "row_times", "rows"))
    return [
        {
            "request": request,
            **_times(times),
            **queued(spec.arrivals, request, times[START]),
            **reported(counts, "request"),
        }
        for request, times, counts in zip(*columns, strict=True)
    ]


def _times(columns: list[int]) -> Row:
    return {
        "start_ns": columns[START],
        "ttft_ns": None if columns[FIRST] == NO_FIRST else columns[FIRST],
        "decode_ns": columns[DECODE],
        "decode_passes": columns[PASSES],
        "decode_tokens": columns[DECODED],
        "end_ns": columns[END],
        "tokens": columns[TOKENS],
    }


def events_of(state: SimulationState, spec: RunSpec) -> list[Event]:
    """Return the event log with names."""
    return [event_of(line, spec) for line in state.arrays["log"][: int(state["log"]["lines"])].tolist()]


def event_of(line: Sequence[int], spec: RunSpec) -> Event:
    """Return a line of numbers, as in `layout.EVENT`, as an event with names."""
    t0, t1, kind, step_pass, layer, expert, precision, cause = line
    return Event(t0, t1, EVENT_KINDS[kind], step_pass, layer, expert, precision, cause_of(cause, spec))


def cause_of(cause: int, spec: RunSpec) -> str:
    """Return the name of a cause."""
    if cause == BY_RESET:
        return spec.config.reset
    return f"for {cause}" if cause >= 0 else CAUSES[-cause]


def check(state: SimulationState, chosen: PolicySet) -> None:
    """Raise the reference engine's error for a run that could not continue, or KeyboardInterrupt if it was stopped."""
    error, eviction, miss = int(state["errors"]["error"]), chosen.eviction.policy.name, chosen.miss.policy.name
    if error == NO_ERROR:
        return
    culprit = int(state["errors"]["culprit"])
    if error == STOPPED:
        raise KeyboardInterrupt
    if error == TOO_LATE:
        raise too_late()
    if error == NO_CPU:
        raise ConfigError("missing [cpu] table in the platform: the miss policy computes on the CPU")
    if error == NO_LOGITS:
        raise PolicyError("a policy that changes the mixture must declare that it needs logits: needs=always('logits')")
    raise AssertionError(
        {
            BAD_VICTIM: f"eviction {eviction}: invalid victim {culprit}: expected an evictable copy of the pool",
            STUCK: "deadlock: a demanded expert finds no space in its pool",
            BAD_CHOICE: f"routing {chosen.routing.policy.name}: invalid expert {culprit}",
            BAD_NAME: f"prefetch {chosen.prefetch.policy.name}: invalid copy {culprit}",
            BAD_WANT: f"miss {miss}: invalid precision {culprit}",
            BAD_VERDICT: f"miss {miss}: invalid verdict {culprit}: expected a verdict or a precision that is wanted",
            BAD_STAND_IN: f"miss {miss}: invalid substitute {culprit}: expected an eligible expert",
            NO_HOOK: f"miss {miss}: PER_TOKEN requires a hook substitute",
        }[error]
    )
