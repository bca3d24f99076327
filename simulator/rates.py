"""Exact arithmetic on a platform's figures: decimals become whole nanoseconds and whole bytes per second.

A figure is the decimal in the file: 0.7 is 7/10, not the nearest double. Figures become ratios of integers once; times
are then integer arithmetic, and each is rounded once, by `half_even` or by `ceiling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import inf, lcm
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError

NS = 1_000_000_000
MILLION = 1_000_000
NOT_YET = -1  #: before the first nanosecond
MOST_NS = 10**15  #: of one thing, eleven days


@lru_cache(maxsize=4096)
def exact(figure: float) -> Fraction:
    """Return a finite figure as the shortest decimal that reads back as it."""
    return Fraction(str(figure))


def half_even(top: int, bottom: int) -> int:
    """Round top / bottom to the nearest integer, halves to the even one; `bottom` > 0."""
    whole, rest = divmod(top, bottom)
    return whole + (2 * rest > bottom or (2 * rest == bottom and whole % 2 == 1))


def ceiling(top: int, bottom: int) -> int:
    """Round top / bottom up; `bottom` > 0."""
    return -(-top // bottom)


def ns_per_byte(bytes_per_s: float) -> Fraction:
    """Return the nanoseconds of one byte, or of one operation: 0 at an infinite rate."""
    return Fraction(0) if bytes_per_s == inf else NS / exact(bytes_per_s)


def part(ns: int, millionths: int) -> int:
    """Return `millionths` of a time, rounded up."""
    return ceiling(ns * millionths, MILLION)


def share_up(ns: int, top: int, bottom: int) -> int:
    """Return top / bottom of a time, rounded up."""
    return ceiling(ns * top, bottom)


def longer(ns: int, share: float) -> int:
    """Return what takes `ns` at the full rate, at this share of the rate, rounded up."""
    of = exact(share)
    return ceiling(ns * of.denominator, of.numerator)


def bounded(ns: int, figure: str, change: str = "raise") -> int:
    """Return the time. Raises ConfigError if it is too long for any run, naming the value to change."""
    if ns > MOST_NS:
        raise ConfigError(f"the platform takes more than eleven days for one expert or pass; {change} its {figure}")
    return ns


class Ceilings(NamedTuple):
    """The two ceilings of a roofline for one set of weights, in nanoseconds over one denominator."""

    compute: int  #: for each token
    memory: int  #: once, to read the weights
    unit: int  #: what both are divided by

    def ns(self, tokens: int) -> int:
        """Return the higher ceiling for `tokens` tokens, times `unit`."""
        return max(self.compute * tokens, self.memory)


@lru_cache(maxsize=4096)
def ceilings(flops: float, bytes_per_s: float, share: float, params: int, size: int) -> Ceilings:
    """Return the ceilings for `params` weights of `size` bytes, where memory keeps a share of its rate."""
    compute = 2 * params * ns_per_byte(flops)
    memory = size * ns_per_byte(bytes_per_s) / exact(share)
    unit = lcm(compute.denominator, memory.denominator)
    return Ceilings(int(compute * unit), int(memory * unit), unit)


class Curve:
    """A measured curve: points (x, y) with x rising, linear in between, constant beyond both ends."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        figures = [exact(y) for _, y in points]
        self._unit = lcm(*(figure.denominator for figure in figures))
        self._points = [(x, int(y * self._unit)) for (x, _), y in zip(points, figures, strict=True)]

    def at(self, place: int, parts: int = 1) -> tuple[int, int]:
        """Return y at x = place / parts as a numerator and a denominator."""
        for (left, low), (right, high) in pairwise(self._points):
            if left * parts <= place <= right * parts:
                width = (right - left) * parts
                return low * width + (high - low) * (place - left * parts), self._unit * width
        first, *_, last = self._points * 2
        return (first if place <= first[0] * parts else last)[1], self._unit

    def of_tokens(self, tokens: int) -> tuple[int, int]:
        """Return y at `tokens` tokens; beyond the last point it grows in proportion."""
        last, y = self._points[-1]
        return (y * tokens, self._unit * last) if tokens > last else self.at(tokens)


@lru_cache(maxsize=256)
def curve(points: tuple[tuple[int, float], ...]) -> Curve:
    """Return the curve of these points, made once."""
    return Curve(points)


def by_tokens(ns: int, points: tuple[tuple[int, float], ...], tokens: int) -> int:
    """Return the nanoseconds of `tokens` tokens if one takes `ns`, halves to even; `ns` without a curve."""
    if not points:
        return ns
    times, unit = curve(points).of_tokens(tokens)
    return bounded(half_even(ns * times, unit), "times by tokens")
