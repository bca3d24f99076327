"""Requests that arrive over time: their times, and the schedule of passes that follows from them.

A request's shares of passes (its prompt or pieces of it, then a token each) do not depend on time; which pass a share
falls in does. Section *Arrivals* of `docs/semantics.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.policies.contract import Prefetch
from moereplay.policies.grammar import Chosen
from moereplay.results.serving import LISTED, shortened
from moereplay.simulator.errors import LATEST_NS, ConfigError
from moereplay.simulator.rates import NS
from moereplay.simulator.source import Idle, Pass, Row, TraceGates
from moereplay.traces.documents import DocumentError, content, from_json
from moereplay.traces.drafts import uniform
from moereplay.traces.passes import Slots, schedule, slots_of
from moereplay.traces.schema import Trace
from moereplay.traces.texts import counted, meant

ALL = "all"  #: every request is there at the start: the order of passes is known before the run
EXPECTED = "expected all, every:S, poisson:R (S seconds apart, R per second) or a JSON file of seconds"
NUMBER = r"([0-9]{1,20}(\.[0-9]{0,30})?|\.[0-9]{1,30})(e[+-]?[0-9]{1,2})?"
ADDED = 2  #: to the seed of the run, for the seed of gaps
PRECISE = 40  #: decimal digits of a logarithm before it is rounded to a double

# -- times


def parse_arrivals(text: str) -> str:
    """Return a checked setting, with the times of a file in its place. Raises ConfigError."""
    if text.endswith(".json"):
        seconds = numbers_in(text, "arrivals", "seconds, one per request", (int, float))
        text = f"{LISTED}:{'/'.join(repr(each) for each in seconds)}"
    arrival_times(text, 0, 1 if text.partition(":")[0] != LISTED else text.count("/") + 1)
    return text


def check_together(arrivals: str, passes: str) -> None:
    """Raises ConfigError if requests arrive under a schedule without slots."""
    if arrivals != ALL and slots_of(passes) is None:
        raise ConfigError(f"--arrivals {shortened(arrivals)} requires --passes batch:N")


def numbers_in(path: str, setting: str, what: str, kinds: tuple[type, ...], least: int = 1) -> list[Any]:
    """Return the numbers that a setting's file lists, `least` or more. Raises ConfigError."""
    try:
        listed = from_json(content(Path(path)))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting} {path}: {reason}: expected a JSON list of {what}") from None
    if not isinstance(listed, list) or len(listed) < least or any(type(each) not in kinds for each in listed):
        raise ConfigError(f"invalid {setting} {path}: expected a JSON list of {what}")
    return listed


def arrival_times(text: str, seed: int, requests: int) -> tuple[int, ...]:
    """Return when each of so many requests arrives, ns; empty if all are there at the start. Raises ConfigError."""
    name, _, figure = text.partition(":")
    if text == ALL:
        return ()
    if name == "every":
        gap = _figure(figure, text)
        return _checked(text, [number * gap for number in range(requests)])
    if name == "poisson" and (rate := _figure(figure, text)) > 0:
        gaps = (-each / float(rate) for each in _logarithms(seed, requests))  # exponential, added up in doubles
        return _checked(text, map(Fraction, accumulate(gaps)))
    if name == LISTED:
        times = [_figure(each, text) for each in figure.split("/")]
        if len(times) != requests:
            raise ConfigError(
                f"--arrivals lists {counted(len(times), 'time')}; the trace has {counted(requests, 'request')}"
            )
        return _checked(text, times)
    raise ConfigError(f"invalid arrivals {text!r}: {meant(name, (ALL, 'every', 'poisson'))}{EXPECTED}")


def _figure(text: str, whole: str) -> Fraction:
    """Return a figure as the decimal that it is written as. Raises ConfigError unless it is at least 0."""
    if not re.fullmatch(NUMBER, text):
        raise ConfigError(f"invalid arrivals {shortened(whole)!r}: {EXPECTED}")
    return Fraction(text)


@lru_cache(maxsize=2)
def _logarithms(seed: int, requests: int) -> list[float]:
    """Return ln(1 - u) of each request: a search for a rate draws the same for every rate."""
    with localcontext() as precise:  # correctly rounded: the logarithm of `math` is another on some machines
        precise.prec = PRECISE
        return [float(Decimal(1 - each).ln()) for each in uniform(seed + ADDED, np.arange(requests)).tolist()]


def _checked(text: str, seconds: Iterable[Fraction]) -> tuple[int, ...]:
    """Round each time to nanoseconds, half to even. Raises ConfigError if they fall or are too late."""
    times = tuple(round(each * NS) for each in seconds)
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ConfigError(f"invalid arrivals {shortened(text)!r}: expected times that do not decrease")
    if times and times[-1] > LATEST_NS:
        raise ConfigError(f"invalid arrivals {shortened(text)!r}: expected the last within 146 years")
    return times


# -- the schedule


class Arriving:
    """Continuous batching of requests that arrive: a free slot takes the next request that is there."""

    def __init__(self, shares: Iterable[Pass], arrivals: Sequence[int], slots: Slots) -> None:
        """`shares` are the passes of requests alone, in trace order; `arrivals` are by request number, ns."""
        self._coming = [
            (request, [step.rows for step in steps]) for request, steps in groupby(shares, lambda step: step.request)
        ]
        self._coming.reverse()
        self._arrivals = arrivals
        self._slots: list[list[Sequence[Row]]] = list(repeat([], min(slots.many, len(self._coming))))

    def next_rows(self, now: int) -> Sequence[Row] | Idle:
        """Return a share of every occupied slot, after free ones have taken who has arrived."""
        for slot, left in enumerate(self._slots):
            if not left and self._coming and self._arrivals[self._coming[-1][0]] <= now:
                self._slots[slot] = self._coming.pop()[1][::-1]
        rows = [row for left in self._slots if left for row in left.pop()]
        if not rows and self._coming:
            return Idle(self._arrivals[self._coming[-1][0]])
        return rows


class ShareSource(TraceGates):
    """A recorded trace whose requests arrive over time: its passes are what each of them gives to a pass."""

    def __init__(
        self,
        trace: Trace,
        passes: str,
        requests: int,
        prefetch: Chosen[Prefetch],
        needs: frozenset[str],
        look: tuple[str, int] = ("recorded", 0),
    ) -> None:
        """`requests` arrive; the trace begins anew after its last."""
        super().__init__(trace, prefetch, needs, look)
        slots = slots_of(passes)
        assert slots is not None  # checked with the configuration
        self._plan = schedule(trace, slots.alone).repeated(requests)

    def passes(self) -> Iterator[Pass]:
        """Yield the shares of every request, in trace order."""
        return (Pass.planned(index, self._plan) for index in range(len(self._plan)))
