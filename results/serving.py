"""Figures of serving, from the rows of requests: latencies from arrival, percentiles, throughput and goodput.

A percentile is the nearest rank: the smallest value that at least so many percent of the requests do not exceed. It is
undefined (None) where no request has the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from moereplay.results.errors import ResultError
from moereplay.results.result import Result
from moereplay.traces.texts import counted, digits
from moereplay.traces.units import MS, SECOND

Row = Mapping[str, Any]  #: of a request
LISTED = "at"  #: begins a setting of arrivals that lists times from a file, one per request
UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
PERCENTILES = (50, 90, 99)
EXPECTED = "expected ttft=TIME, tpot=TIME, e2e=TIME and share=0..1, as in ttft=2s,tpot=100ms,share=0.9"


def ttft_ns(row: Row) -> int | None:
    """Return the time from a request's arrival to the end of its prompt, or None without a prompt."""
    return None if row["ttft_ns"] is None else row["queued_ns"] + row["ttft_ns"]


def tpot_ns(row: Row) -> Fraction | None:
    """Return a request's mean time per decoded token, or None if it decodes nothing."""
    return Fraction(row["decode_ns"], row["decode_tokens"]) if row["decode_tokens"] else None


def e2e_ns(row: Row) -> int:
    """Return the time from a request's arrival to its end."""
    return row["end_ns"] - row["arrival_ns"]


#: Latencies of a request, by name, and as they are printed.
LATENCIES: dict[str, Callable[[Row], int | Fraction | None]] = {"ttft": ttft_ns, "tpot": tpot_ns, "e2e": e2e_ns}
WORDS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "e2e"}


class Level(NamedTuple):
    """A service level: the most of each latency, ns, and the share of requests that have to meet all of them."""

    most: Mapping[str, int]  #: by the names of LATENCIES
    share: Fraction

    @property
    def in_words(self) -> str:
        """The latencies and their limits."""
        return " and ".join(f"{WORDS[name]} {_in_unit(ns)}" for name, ns in self.most.items())

    def is_met_by(self, row: Row) -> bool:
        """Return True if a request meets it; a latency that the request does not have is met."""
        found = {name: LATENCIES[name](row) for name in self.most}
        return all(value is None or value <= self.most[name] for name, value in found.items())

    def holds(self, rows: Sequence[Row]) -> bool:
        """Return True if enough of these requests meet it."""
        return sum(map(self.is_met_by, rows)) >= self.share * len(rows)


def parse_level(text: str) -> Level:
    """Return the service level of a text, such as ttft=2s,tpot=100ms,share=0.9. Raises ResultError."""
    most, share = dict[str, int](), Fraction(9, 10)
    for each in text.split(","):
        name, _, value = each.strip().partition("=")
        if name in LATENCIES and name not in most and (spent := _nanoseconds(value)):
            most[name] = spent
        elif name == "share" and re.fullmatch(r"(0?\.[0-9]{1,9}|1(\.0*)?)", value):
            share = Fraction(value)
        else:
            raise ResultError(f"invalid --slo {text!r}: {EXPECTED}")
    if not most or not share:
        raise ResultError(f"invalid --slo {text!r}: {EXPECTED}")
    return Level(most, share)


def _nanoseconds(text: str) -> int | None:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|ms|s)", text)
    return round(Fraction(found[1]) * UNITS[found[2]]) if found else None


def _in_unit(ns: int) -> str:
    """Return a time in the largest unit that it fills."""
    unit = max((unit for unit in UNITS if UNITS[unit] <= ns), key=lambda unit: UNITS[unit])
    return f"{digits(ns / UNITS[unit], 4)} {unit}"


def percentile(values: Sequence[int | Fraction], percent: int) -> int | Fraction | None:
    """Return the nearest rank of values."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


def slowest(many: int, percents: Sequence[int] = PERCENTILES, stop: str = "") -> str:
    """Return which percentiles of so many requests are the slowest one's, in words; empty if none is."""
    last = [f"p{percent}" for percent in percents if percent * many > 100 * (many - 1)]
    return f"{' and '.join(last)} of {counted(many, 'request')}: the slowest one{stop}" if last else ""


def figures(rows: Sequence[Row], level: Level | None = None) -> dict[str, float | int | None]:
    """Return the figures of a run from the rows of its requests; those of a level only with one.

    Throughput counts from the first arrival to the last end.
    """
    span = max(row["end_ns"] for row in rows) - min(row["arrival_ns"] for row in rows)
    found: dict[str, float | int | None] = {"requests": len(rows)}
    for name, latency in LATENCIES.items():
        values = [value for row in rows if (value := latency(row)) is not None]
        found |= {f"{name}_p{percent}_ms": _ms(percentile(values, percent)) for percent in PERCENTILES}
    found["queued_mean_ms"] = sum(row["queued_ns"] for row in rows) / len(rows) / MS
    found["requests_per_s"] = _rate(len(rows), span)
    found["throughput_tokens_per_s"] = _rate(sum(row["decode_tokens"] for row in rows), span)
    if level is not None:
        met = sum(map(level.is_met_by, rows))
        found |= {"slo_share": met / len(rows), "goodput_per_s": _rate(met, span)}
    return found


def _ms(ns: int | Fraction | None) -> float | None:
    return None if ns is None else float(ns / Fraction(MS))


def _rate(many: int, ns: int) -> float | None:
    return many * SECOND / ns if ns else None


# -- settings of arrivals, as results hold them


def shortened(arrivals: str) -> str:
    """Return a setting of arrivals for a message or a table: of listed times only how many they are."""
    name, _, times = arrivals.partition(":")
    return f"of {times.count('/') + 1} times" if name == LISTED else arrivals


def rate_of(arrivals: str | None) -> float | None:
    """Return the requests per second of a setting of arrivals, or None if it has no rate."""
    name, _, figure = (arrivals or "").partition(":")
    if name == "poisson":
        return float(figure)
    return 1 / float(figure) if name == "every" and float(figure) else None


# -- The steady state of a long run, and whether it has one

FINE = 1.01  #: ratio of neighbouring rates that are tried: a level holds at the lower one
SETTLED = 0.02  #: share of the largest rate by which it may move when the number of requests doubles
COLD = 8  #: the first of so many equal parts of a run is not counted: its cache is cold and its queue short
GROWTH = 0.05  #: of a queue that counts as stable: share of arrivals that do not end, seconds of waiting per second


def steady(rows: Sequence[Row], slots: int) -> list[Row]:
    """Return the rows of a run's requests in the order of arrival, without its cold part and the last in its slots.

    While these end, no further ones join their passes.
    """
    ordered = sorted(rows, key=lambda row: row["request"])
    return ordered[len(rows) // COLD : len(rows) - slots]


def is_stable(rows: Sequence[Row]) -> bool:
    """Return whether a queue keeps up: as many requests end as arrive in the second half, and waits have no trend."""
    half = sorted(rows, key=lambda row: row["arrival_ns"])[len(rows) // 2 :]
    first, last = half[0]["arrival_ns"], half[-1]["arrival_ns"]
    if first == last:
        return True
    ended = sum(first < row["end_ns"] <= last for row in rows)
    arrived = sum(first < row["arrival_ns"] <= last for row in half)
    from statistics import linear_regression  # a replay without a search for a rate does without the module

    trend = linear_regression([row["arrival_ns"] for row in half], [row["queued_ns"] for row in half]).slope
    return ended >= (1 - GROWTH) * arrived and trend <= GROWTH


def saturated_rate(rows: Sequence[Row]) -> float:
    """Return how many requests per second leave a run whose requests are all there at the start, after its cold part.

    A slot that becomes free is taken at once, so starts are counted: until the last one, no slot is empty.
    """
    starts = sorted(row["start_ns"] for row in rows)[len(rows) // COLD :]
    return (len(starts) - 1) * SECOND / max(1, starts[-1] - starts[0])


class Holding(NamedTuple):
    """The largest rate of arrivals at which the queue of a configuration is stable and a level holds."""

    result: Result  #: at that rate; at the lowest that was tried if none holds
    rows: Sequence[Row]  #: its requests in the steady state
    rate: float | None  #: requests per second
    by_queue: bool  #: whether at the next rate the level holds, but the queue grows
    most: float  #: requests per second that leave while others always wait: no larger rate is stable
    moved: float | None  #: share of the rate by which it moved when requests were last doubled, None if they never were
    settled: bool  #: False if the cap on work ended the search
    tried: int  #: replays
